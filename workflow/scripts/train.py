"""Train a SegFormer on drawn scenes or on a folder of labelled images, and write its weights.

python workflow/scripts/train.py --network segformer-b0-512 --output weights.safetensors --minutes 10
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.scenes.sources import LABELLED
from tilewright_study.stages.train import run
from tilewright_study.training import RECIPES

parser = parser_for(__doc__)
add = parser.add_argument
add("--network", required=True, help="network, e.g. segformer-b0-512")
add(
    "--output",
    type=flags.output,
    required=True,
    metavar="FILE",
    help="weights to write, .safetensors, or in parts .index.json; an unfinished training continues",
)
add(
    "--data",
    default="scenes",
    help=f"scenes, a folder with data.toml, or NAME=FOLDER of {', '.join(LABELLED)} (default: scenes)",
)
add("--recipe", default="plain", help=f"{', '.join(RECIPES)}, or a recipe as JSON or a JSON file (default: plain)")
add("--minutes", type=flags.seconds, help="end after this time in minutes; compilation is not counted")
add("--steps", type=flags.count, help="end after this number of steps")
add(
    "--size",
    type=flags.pixels,
    metavar="PIXELS",
    help="height and width of all images (default: the sizes of the recipe, one after the other)",
)
add("--batch", type=flags.count, metavar="N", help="images in a step, with --size (default: 32)")
add(
    "--from",
    dest="start",
    metavar="FILE",
    help="weights to start from; their classes may differ (default: random weights)",
)
add("--log", type=flags.output, metavar="CSV", help="file for images, learning rate and losses of each step")
add(
    "--scores",
    type=flags.output,
    metavar="JSON",
    help="file for mean IoU on held-out images, and images per second of the training",
)
add(
    "--judged",
    type=flags.whole,
    default=256,
    metavar="N",
    help="held-out images of each split for --scores (default: 256)",
)
add("--paths", nargs="+", default=[], metavar="PATH", help="paths that are scored, too, e.g. 2.2.3.2")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, help="seed of weights and images (default: of the recipe)")
add(
    "--limit-s",
    type=flags.seconds,
    metavar="S",
    help="stop after this time in seconds; the same command continues (default: never)",
)
add("--compiled", action="store_true", help="compile the step by torch.compile; of paths, the blocks and the decoder")

if __name__ == "__main__":
    script(parser, run)
