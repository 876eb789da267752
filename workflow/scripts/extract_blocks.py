"""Cover a reordered graph by nearly dense blocks, for one tile or for several.

python workflow/scripts/extract_blocks.py --input A_ic.npz --tile 64x64 --output blocks.npz
"""

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.blocks import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--input", dest="graph", required=True, metavar="NPZ", help="reordered graph, e.g. results/graphs/A_ic.npz")
# The published artifact's command names no tile.
add(
    "--tile",
    nargs="+",
    default=["64x64"],
    help="MxN, M queries by N keys: 64x64 (contiguous keys) or 64x1 (gathered keys) (default: 64x64)",
)
add("--output", type=flags.output, nargs="+", required=True, metavar="NPZ", help="blocks file to write for each tile")
add("--region-rows", type=flags.count, default=128, help="most queries in a region (default: %(default)s)")

if __name__ == "__main__":
    script(parser, run)
