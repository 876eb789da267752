"""T4: time schedules of one graph whole and write the fastest."""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.tune import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--schedule", nargs="+", required=True, metavar="JSON", help="schedules of one graph to choose from")
add("--graph", required=True, metavar="NPZ", help="their graph, in plan order")
add("--blocks", nargs="+", required=True, metavar="NPZ", help="blocks of every tile that they may choose")
add("--profile", nargs="+", required=True, metavar="JSON", help="profiles of these blocks")
add("--seed", type=flags.seed, default=0, help="seed of the tokens (default: 0)")
add("--output", type=flags.output, required=True, metavar="JSON", help="the fastest schedule")

if __name__ == "__main__":
    script(parser, run)
