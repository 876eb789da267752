"""Train a SegFormer on scenes, or on images with labels in a folder, and write its weights."""

import argparse

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.train import run
from tilewright_study.training import RECIPES

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--network", required=True, help="network, e.g. segformer-b0-512")
add(
    "--output",
    type=flags.output,
    required=True,
    metavar="FILE",
    help="weights, .safetensors or in parts .index.json; a training goes on",
)
add("--data", default="scenes", help="scenes, or camvid, ade20k or cityscapes with =FOLDER (default: scenes)")
add("--recipe", default="plain", help=f"{', '.join(RECIPES)}, or one in JSON or a file of it (default: plain)")
add("--minutes", type=flags.seconds, help="end after so many minutes, what torch compiles not counted")
add("--steps", type=flags.count, help="end after so many steps")
add(
    "--size",
    type=flags.pixels,
    metavar="PIXELS",
    help="sides of all images (default: the recipe's sizes, one after the other)",
)
add("--batch", type=flags.count, metavar="N", help="images of a step, beside --size (default: 32)")
add("--from", dest="start", metavar="FILE", help="weights to go on from, maybe of other classes (default: random ones)")
add("--log", type=flags.output, metavar="CSV", help="images seen, rate and losses of each step")
add(
    "--scores",
    type=flags.output,
    metavar="JSON",
    help="mean IoU on images that are not trained with, and images a second",
)
add(
    "--judged",
    type=flags.whole,
    default=256,
    metavar="N",
    help="images of each split that it is judged by (default: 256)",
)
add("--paths", nargs="+", default=[], metavar="PATH", help="execution paths that it is judged by besides")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, help="seed of weights and of all that is drawn (default: of the recipe)")
add(
    "--limit-s",
    type=flags.seconds,
    metavar="S",
    help="stop after so many seconds; the same command goes on (default: never)",
)
add("--compiled", action="store_true", help="compile the step by torch.compile, of paths blocks and decoder")

if __name__ == "__main__":
    script(parser, run)
