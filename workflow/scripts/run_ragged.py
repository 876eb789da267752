"""T5: attention of packed images, and the calls that pack them; every time follows a check."""

import argparse

from tilewright.baselines import packed as packed_baselines
from tilewright.study.bench.stage import run_ragged
from tilewright.study.cli import script, timing_options

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--heads", type=int, required=True, help="attention heads")
add("--head-dim", type=int, required=True, help="dimension of a head")
add("--lengths", nargs="+", default=["50-197"], metavar="LOW-HIGH", help="tokens of an image (default: 50-197)")
add(
    "--attention",
    nargs="+",
    default=["tilewright=1,16"],
    metavar="NAME=IMAGES[,IMAGES...]",
    help=f"tilewright, {', '.join(packed_baselines.NAMES)}, with its numbers of images (default: tilewright=1,16)",
)
timing_options(add, 1.0, "lengths and tokens")

if __name__ == "__main__":
    script(parser, run_ragged)
