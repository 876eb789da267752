"""T1: build a model's attention pattern and write it as a graph."""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.graph import run

SETTINGS = "parameters beyond the name, values in YAML, e.g. window=9 or image=photo.jpg"

parser = argparse.ArgumentParser(description=__doc__)
what = parser.add_mutually_exclusive_group(required=True)
what.add_argument("--model", help="workload, e.g. vil-tiny-224-s1, or a published name, e.g. VisionLongformer")
what.add_argument("--list", dest="known", action="store_true", help="list workloads' names and photographs instead")
parser.add_argument("--output", type=flags.output, metavar="NPZ", help="graph file to write")
parser.add_argument("--set", dest="stated", nargs="+", default=[], metavar="KEY=VALUE", help=SETTINGS)

if __name__ == "__main__":
    script(parser, run)
