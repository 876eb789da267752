"""T4: plan which path of a network each budget of time runs, from rows of the experiment paths."""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.plan_paths import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--profile", required=True, metavar="CSV", help="rows of the experiment paths: single skips and random sets")
add(
    "--output",
    type=flags.output,
    required=True,
    metavar="JSON",
    help="the path of each budget, and what it should take and see",
)
add("--solver", default="highs", help="exhaustive, highs or gurobi (default: highs)")
add("--budgets", type=flags.positive, nargs="+", metavar="US", help="budgets in microseconds (default: spread evenly)")
add("--count", type=flags.count, default=12, metavar="N", help="of budgets, where none are stated (default: 12)")
add("--rung", default="trained", help="trained or statistics (default: trained)")
add("--seed", type=flags.seed, default=0, help="of the folds of cross-validation (default: 0)")

if __name__ == "__main__":
    script(parser, run)
