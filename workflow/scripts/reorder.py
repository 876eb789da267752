"""Order the queries and keys of a graph so that nearly dense blocks cover its pattern.

python workflow/scripts/reorder.py --method ic --input A.npz --output A_ic.npz
"""

from functools import partial

from tilewright.attention import reorder
from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.stages.reorder import run

SETTINGS = "settings of the order, values in YAML, e.g. tau=0.3 variant=paper; those left out are tuned on the graph"


def command(description, method=None):
    """Run the command line, whose ``--method`` is left out where it is given here."""
    parser = parser_for(description)
    add = parser.add_argument
    if method is None:
        add("--method", required=True, help=f"order: {', '.join(reorder.NAMES)}")
    add("--input", dest="graph", required=True, metavar="NPZ", help="graph to order")
    add("--output", type=flags.output, required=True, metavar="NPZ", help="reordered graph to write")
    set_option(add, SETTINGS)
    script(parser, run if method is None else partial(run, method))


if __name__ == "__main__":
    command(__doc__)
