"""Train a video network by rectified flow on clips of moving photographs, and write its weights.

python workflow/scripts/train_video.py --network wan-tiny-480p-81f --output weights.safetensors --limit-s 600
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.stages.train_video import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--network", required=True, help="network, e.g. wan-tiny-480p-81f")
add(
    "--output",
    type=flags.output,
    required=True,
    metavar="FILE",
    help="weights to write, .safetensors, or in parts .index.json; an unfinished training continues",
)
add("--losses", type=flags.output, metavar="CSV", help="file for the loss of each step")
add("--samples", metavar="PNG", help="picture of frames of drawn clips and of clips that the network samples")
add(
    "--recipe",
    metavar="JSON",
    help="recipe as JSON or a JSON file, see tilewright_study.training.video (default: for wan-tiny)",
)
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, help="seed of weights, clips and noise (default: of the recipe)")
add(
    "--limit-s",
    type=flags.seconds,
    metavar="S",
    help="stop after this time in seconds; the same command continues (default: never)",
)
add("--compiled", action="store_true", help="compile the layers by torch.compile")
set_option(add, "options of the network, e.g. layers=2", dest="set")

if __name__ == "__main__":
    script(parser, run)
