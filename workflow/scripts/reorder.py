"""T2: put the queries and keys of a graph in a new order."""

import argparse

from tilewright import reorder
from tilewright.study.cli import script
from tilewright.study.stages.reorder import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True, help=f"order: {', '.join(reorder.NAMES)}")
    parser.add_argument("--input", required=True, help="graph to order (.npz)")
    parser.add_argument("--output", required=True, help="reordered graph to write (.npz)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the order, values in YAML, e.g. tau=0.3 variant=paper; those left out are tuned on the graph",
    )
    script(parser, run)
