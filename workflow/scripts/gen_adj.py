"""T1: build a model's attention pattern and write it as a graph."""

import argparse

from tilewright.study.cli import script
from tilewright.study.stages.graph import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="workload, e.g. vil-tiny-224-s1")
    what.add_argument(
        "--list", action="store_true", help="say how workloads are named, and which photographs there are"
    )
    parser.add_argument("--output", help="graph file to write (.npz)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="parameters beyond the name, values in YAML, e.g. window=9 or image=photo.jpg",
    )
    script(parser, run)
