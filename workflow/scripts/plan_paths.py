"""Choose the path of a network for each time budget, from measured rows of the experiment `paths`.

python workflow/scripts/plan_paths.py --profile segformer-b0-512.csv --output plans.json --budgets 9000 12000
"""

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.plan_paths import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--profile", required=True, metavar="CSV", help="rows of the experiment paths, with the base and its single skips")
add(
    "--output",
    type=flags.output,
    required=True,
    metavar="JSON",
    help="file for the path of each budget, with its predicted latency and mean IoU",
)
add("--solver", default="highs", help="exhaustive, highs or gurobi (default: highs)")
add(
    "--budgets",
    type=flags.positive,
    nargs="+",
    metavar="US",
    help="time budgets in microseconds (default: spread evenly)",
)
add(
    "--count",
    type=flags.count,
    default=12,
    metavar="N",
    help="number of budgets, if --budgets is left out (default: 12)",
)
add(
    "--rung",
    default="trained",
    help="batch-norm statistics of the rows: trained, or statistics of each path (default: trained)",
)
add("--seed", type=flags.seed, default=0, help="seed of the folds of cross-validation (default: 0)")

if __name__ == "__main__":
    script(parser, run)
