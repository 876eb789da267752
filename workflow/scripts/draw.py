"""Draw a figure from files of a run.

python workflow/scripts/draw.py --figure reorder_time --inputs results/logs/orders/*.csv --outputs orders.svg
"""

from tilewright.core import flags
from tilewright_study import figures
from tilewright_study.cli import parser_for, script


def run(figure, inputs, outputs):
    figures.draw(figure, inputs, outputs)


if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("--figure", required=True, help=f"figure: {', '.join(figures.NAMES)}")
    parser.add_argument(
        "--inputs", required=True, nargs="+", metavar="FILE", help="files that the figure is drawn from"
    )
    parser.add_argument(
        "--outputs",
        type=flags.output,
        required=True,
        nargs="+",
        metavar="FILE",
        help="files to write: .svg, .png, .pdf, .json (its origin)",
    )
    script(parser, run)
