"""T5: attention of packed images, and the calls that pack them; every time follows a check."""

import argparse

from tilewright import hardware
from tilewright.bench.stage import run_ragged
from tilewright.cli import script
from tilewright.kernels import ragged_baselines

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
    help=f"tilewright, {', '.join(ragged_baselines.NAMES)}, with its numbers of images (default: tilewright=1,16)",
)
add("--device", default="cpu", help=f"{' or '.join(hardware.KINDS)} (default: cpu)")
add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
add("--rse", type=float, default=0.02, help="stop at this relative standard error (default: 0.02)")
add("--min-repetitions", type=int, default=10, help="but not before as many calls (default: 10)")
add("--max-seconds", type=float, default=1.0, help="and stop after this time in any case (default: 1)")
add("--seed", type=int, default=0, help="seed of lengths and tokens (default: 0)")
add("--output", required=True, metavar="CSV", help="the rows to write")

if __name__ == "__main__":
    script(parser, run_ragged)
