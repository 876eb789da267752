"""Train a DeiT to name the main object of crops of scenes, and DynamicViT's predictor for it, and write the weights."""

import argparse

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.train_classifier import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--network", required=True, help="network that is not pruned, e.g. deit-tiny-224")
add("--output", type=flags.output, required=True, metavar="FILE", help="weights to write, .safetensors")
add("--predictor", type=flags.output, metavar="FILE", help="the same weights with a trained predictor of DynamicViT")
add("--losses", type=flags.output, metavar="CSV", help="the loss of each step")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, default=0, help="of the weights and of the crops (default: 0)")
add("--seconds", type=flags.seconds, metavar="S", help="of the training; rates of learning follow the clock")
add("--steps", type=flags.count, metavar="N", help="of the training, at most")
add("--predictor-seconds", type=flags.seconds, metavar="S", help="of the predictor's")
add("--predictor-steps", type=flags.count, metavar="N", help="of the predictor's, at most")
add(
    "--keep-ratio",
    type=flags.share,
    default=0.7,
    metavar="R",
    help="tokens the predictor keeps at a pruning (default: 0.7)",
)
add("--batch", type=flags.count, help="images of a step (default: of the recipes)")
add("--compiled", action="store_true", help="compile the network by torch.compile")

if __name__ == "__main__":
    script(parser, run)
