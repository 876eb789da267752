"""Run a network on a photograph: latency, most probable classes, and a picture of the tokens it keeps or attends to."""

import argparse

from tilewright import devices
from tilewright.core import flags, images
from tilewright_study.cli import script
from tilewright_study.inference import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--model", required=True, help="network, e.g. vil-tiny-224, regionvit-small-384-w14, dynamicvit-s-224")
add("--image", required=True, help=f"an RGB file, or one of {', '.join(images.PHOTOGRAPHS)}")
add(
    "--checkpoint",
    metavar="FILE",
    help="official checkpoint, .pth or .safetensors, or cached: timm's (default: random)",
)
add(
    "--attention",
    help="tilewright, dense, flex, native; DeiT: padded, ragged, … (default: tilewright, of a DeiT padded)",
)
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add(
    "--output",
    type=flags.output,
    metavar="PICTURE",
    help="picture to write (.png, .svg, .pdf): kept patches, or what a token attends to",
)
add("--labels", metavar="FILE", help="names of the classes, one on each line (default: their numbers)")
add("--token", metavar="Y,X", help="row and column of that token on the first stage's grid (default: the centre)")
add(
    "--set",
    nargs="+",
    default=[],
    metavar="KEY=VALUE",
    help="options beyond the name, values in YAML, e.g. keep_ratio=0.5 num_classes=21841",
)

if __name__ == "__main__":
    script(parser, run)
