"""Make a table from files of a run.

python workflow/scripts/table.py --table reorder_time --inputs results/logs/orders/*.csv --outputs orders.md
"""

from tilewright.core import flags
from tilewright_study import tables
from tilewright_study.cli import parser_for, script


def run(table, inputs, outputs):
    tables.tabulate(table, inputs, outputs)


if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("--table", required=True, help=f"table: {', '.join(tables.NAMES)}")
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE", help="files that the table is made from")
    parser.add_argument(
        "--outputs",
        type=flags.output,
        required=True,
        nargs="+",
        metavar="FILE",
        help="files to write: .csv, .md, .json (its origin)",
    )
    script(parser, run)
