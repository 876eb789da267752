"""T2: put the queries and keys of a graph in a new order."""

import argparse

from tilewright import reorder
from tilewright.study.cli import script
from tilewright.study.stages.reorder import run

SETTINGS = "settings of the order, values in YAML, e.g. tau=0.3 variant=paper; those left out are tuned on the graph"

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--method", required=True, help=f"order: {', '.join(reorder.NAMES)}")
add("--input", dest="graph", required=True, metavar="NPZ", help="graph to order")
add("--output", required=True, metavar="NPZ", help="reordered graph to write")
add("--set", dest="stated", nargs="+", default=[], metavar="KEY=VALUE", help=SETTINGS)

if __name__ == "__main__":
    script(parser, run)
