"""T5: run a whole network with each kind of attention; its time follows the comparison of its logits."""

import argparse

from tilewright.study.bench.stage import run_network
from tilewright.study.cli import script, timing_options

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add(
    "--network",
    required=True,
    help="network, e.g. vil-tiny-224, regionvit-small-384-w14, dynamicvit-s-224, deit-small-224-evit",
)
add(
    "--attention",
    nargs="+",
    metavar="NAME=BATCH[,BATCH...]",
    help="dense, tilewright, flex or native, for a DeiT a strategy, with its batches (default: each at batch 1)",
)
timing_options(add, 2.0, "the weights")

if __name__ == "__main__":
    script(parser, run_network)
