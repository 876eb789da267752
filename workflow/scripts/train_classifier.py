"""Train a DeiT to name the main object of crops of scenes, and write its weights; optionally DynamicViT's predictor.

python workflow/scripts/train_classifier.py --network deit-tiny-224 --output weights.safetensors --seconds 600
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.train_classifier import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--network", required=True, help="network without a pruner, e.g. deit-tiny-224")
add("--output", type=flags.output, required=True, metavar="FILE", help="weights to write, .safetensors")
add(
    "--predictor", type=flags.output, metavar="FILE", help="file for the weights with a trained predictor of DynamicViT"
)
add("--losses", type=flags.output, metavar="CSV", help="file for the loss of each step")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, default=0, help="seed of weights and crops (default: 0)")
add(
    "--seconds",
    type=flags.seconds,
    metavar="S",
    help="duration of the training in seconds, which learning rates follow",
)
add("--steps", type=flags.count, metavar="N", help="most steps of the training")
add("--predictor-seconds", type=flags.seconds, metavar="S", help="duration of the predictor's training in seconds")
add("--predictor-steps", type=flags.count, metavar="N", help="most steps of the predictor's training")
add(
    "--keep-ratio",
    type=flags.share,
    default=0.7,
    metavar="R",
    help="share of the tokens that the predictor keeps at a pruning (default: 0.7)",
)
add("--batch", type=flags.count, help="images in a step (default: of the recipes)")
add("--compiled", action="store_true", help="compile the network by torch.compile")

if __name__ == "__main__":
    script(parser, run)
