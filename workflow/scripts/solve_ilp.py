"""T4: choose tile and round of each region and write the schedule."""

import argparse

from tilewright.attention.schedule.problem import OBJECTIVES
from tilewright.attention.schedule.search import NAMES
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.schedule import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--blocks", nargs="+", required=True, metavar="NPZ", help="blocks files of one graph, one for each tile")
add("--profile", nargs="+", required=True, metavar="JSON", help="profiles of these blocks, in the same order")
add("--solver", nargs="+", default=["highs"], help=f"of each schedule: {', '.join(NAMES)} (default: highs)")
add(
    "--tiles",
    nargs="+",
    metavar="MxN+MxN",
    help="what each schedule chooses from, e.g. 16x1+64x64 (default: all tiles)",
)
add("--objective", default="sum", help=f"{' or '.join(OBJECTIVES)}: the makespan or the longest round (default: sum)")
add("--time-limit", type=flags.seconds, default=60.0, metavar="S", help="seconds for the solver (default: 60)")
add("--gap", type=flags.gap, default=1e-4, help="relative gap at which the search stops (default: 1e-4)")
add("--seed", type=flags.seed, default=0, help="seed of the solver (default: 0)")
add("--threads", type=flags.threads, default=1, help="threads of the solver (default: 1)")
add("--rounds", type=flags.count, help="most rounds of the schedule (default: of the device)")
add("--max-tile-kinds", type=flags.count, metavar="K", help="most tile kinds in a round (default: of the device)")
add("--output", type=flags.output, nargs="+", required=True, metavar="JSON", help="a schedule to write for each solver")

if __name__ == "__main__":
    script(parser, run)
