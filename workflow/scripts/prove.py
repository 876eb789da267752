"""Say what the rows of attention of a run prove.

python workflow/scripts/prove.py --inputs results/logs/vil-tiny-128-s1/*/*.csv --figure figures/speedup.svg
"""

from tilewright_study.cli import parser_for, script
from tilewright_study.stages.proof import run

if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE", help="rows of attention, as CSV")
    parser.add_argument("--figure", required=True, metavar="FILE", help="the figure that was drawn of them")
    script(parser, run)
