"""T5: run a whole network with each kind of attention; its time follows the comparison of its logits."""

import argparse

from tilewright import hardware
from tilewright.bench.stage import run_network
from tilewright.cli import script

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
add("--device", default="cpu", help=f"{' or '.join(hardware.KINDS)} (default: cpu)")
add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
add("--rse", type=float, default=0.02, help="stop at this relative standard error (default: 0.02)")
add("--min-repetitions", type=int, default=10, help="but not before as many calls (default: 10)")
add("--max-seconds", type=float, default=2.0, help="and stop after this time in any case (default: 2)")
add("--seed", type=int, default=0, help="seed of the weights (default: 0)")
add("--output", required=True, metavar="CSV", help="the rows to write")

if __name__ == "__main__":
    script(parser, run_network)
