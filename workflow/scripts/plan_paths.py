"""Choose the path of a network for each time budget, from rows of the experiment `paths`, or measured on your data.

python workflow/scripts/plan_paths.py --profile segformer-b0-512.csv --output plans.json --budgets 9000 12000
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.scenes.sources import LABELLED
from tilewright_study.stages.plan_paths import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--profile", required=True, metavar="CSV", help="rows of the experiment paths; with --data, the file to write")
add("--data", help=f"measure first, on a folder with data.toml or NAME=FOLDER of {', '.join(LABELLED)}")
add("--network", help="network to measure with --data, e.g. segformer-b0-512")
add("--checkpoint", metavar="FILE", help="its weights")
add("--images", type=flags.count, default=64, metavar="N", help="images of each split, at most (default: 64)")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
set_option(add, "other settings of the experiment than those of config.yaml, e.g. compiled=true samples=1000")
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
