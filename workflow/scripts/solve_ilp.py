"""Choose the tile and the round of each region of a graph, by integer programming or greedily.

python workflow/scripts/solve_ilp.py --blocks blocks.npz --profile profile.json --solver highs --output schedule.json
"""

from tilewright.attention.schedule.problem import OBJECTIVES
from tilewright.attention.schedule.search import NAMES
from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.schedule import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--blocks", nargs="+", required=True, metavar="NPZ", help="blocks files of one graph, one for each tile")
add("--profile", nargs="+", required=True, metavar="JSON", help="profiles of these blocks, in the same order")
add("--solver", nargs="+", default=["highs"], help=f"solver of each schedule: {', '.join(NAMES)} (default: highs)")
add(
    "--tiles",
    nargs="+",
    metavar="MxN+MxN",
    help="tiles that each schedule chooses from, e.g. 16x1+64x64 (default: all)",
)
add(
    "--objective",
    default="sum",
    help=f"{' or '.join(OBJECTIVES)}: minimise the sum of the rounds or the longest round (default: sum)",
)
add(
    "--time-limit",
    type=flags.seconds,
    default=60.0,
    metavar="S",
    help="time limit of the solver in seconds (default: 60)",
)
add("--gap", type=flags.gap, default=1e-4, help="relative gap at which the search stops (default: 1e-4)")
add("--seed", type=flags.seed, default=0, help="seed of the solver (default: 0)")
add("--threads", type=flags.threads, default=1, help="threads of the solver (default: 1)")
add("--rounds", type=flags.count, help="most rounds of the schedule (default: the device's)")
add("--max-tile-kinds", type=flags.count, metavar="K", help="most tile kinds in a round (default: the device's)")
add("--output", type=flags.output, nargs="+", required=True, metavar="JSON", help="a schedule to write for each solver")

if __name__ == "__main__":
    script(parser, run)
