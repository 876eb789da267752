"""Put figures, tables and the tile explorer into one HTML file.

python workflow/scripts/make_report.py --figures figures/*.svg --tables results/tables/*.csv --output report.html
"""

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.report import page


def run(figures, tables, explored, recorded, output):
    page.write(figures, tables, explored, output, recorded)


if __name__ == "__main__":
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--figures", nargs="*", default=[], metavar="SVG", help="figures, each with its origin in the same folder")
    add("--tables", nargs="*", default=[], metavar="CSV", help="tables, each with its origin in the same folder")
    add("--explored", nargs="*", default=[], metavar="FILE", help="graphs, blocks, profiles and schedules to explore")
    add(
        "--recorded",
        nargs="*",
        default=[],
        metavar="CSV",
        help="claims, numbers of the paper, and rows of a recorded run",
    )
    add("--output", type=flags.output, required=True, metavar="HTML", help="the page to write")
    script(parser, run)
