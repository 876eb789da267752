"""Train a video network by rectified flow on clips of moving photographs, and write its weights."""

import argparse

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.train_video import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--network", required=True, help="network, e.g. wan-tiny-480p-81f")
add(
    "--output",
    type=flags.output,
    required=True,
    metavar="FILE",
    help="weights, .safetensors or in parts .index.json; a training goes on",
)
add("--losses", type=flags.output, metavar="CSV", help="the loss of each step")
add("--samples", metavar="PNG", help="frames of clips as they are drawn, and as the network samples them")
add("--recipe", metavar="JSON", help="a file, or the JSON, of tilewright_study.training.video (default: for wan-tiny)")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, help="seed of weights, clips and noise (default: of the recipe)")
add(
    "--limit-s",
    type=flags.seconds,
    metavar="S",
    help="stop after so many seconds; the same command goes on (default: never)",
)
add("--compiled", action="store_true", help="compile the layers by torch.compile")
add(
    "--set",
    nargs="+",
    default=[],
    metavar="KEY=VALUE",
    help="options of the network, e.g. layers=2",
)

if __name__ == "__main__":
    script(parser, run)
