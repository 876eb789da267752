"""T2: cover a reordered graph by nearly dense blocks of a tile, or of several."""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.blocks import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--input", dest="graph", required=True, metavar="NPZ", help="reordered graph, e.g. results/graphs/A_ic.npz")
# The published artifact's command names no tile.
add(
    "--tile", nargs="+", default=["64x64"], help="MxN: 64x64 (contiguous keys) or 64x1 (gathered keys) (default: 64x64)"
)
add("--output", type=flags.output, nargs="+", required=True, metavar="NPZ", help="blocks file to write for each tile")
add("--region-rows", type=flags.count, default=128, help="most rows in a region (default: %(default)s)")

if __name__ == "__main__":
    script(parser, run)
