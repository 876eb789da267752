"""Evaluate a network on a folder of labelled images: top-1, top-5 and images a second, with each of its attentions."""

import argparse

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.evaluation import DTYPES, run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--model", required=True, help="network, e.g. deit-small-224, vil-tiny-224, regionvit-tiny-224, dynamicvit-s-224")
add("--data", required=True, metavar="FOLDER", help="FOLDER/<split>/<class>/*, as ImageNet lies, or FOLDER/<class>/*")
add("--checkpoint", metavar="FILE", help="official weights, .pth or .safetensors, or cached: timm's (default: random)")
add("--attention", nargs="+", default=[], metavar="NAME", help="attentions, or batchings of a DeiT (default: all)")
add("--split", default="val", help="part of the folder (default: val)")
add("--count", type=flags.count, metavar="N", help="images at most, evenly spread (default: all)")
add("--batch", type=flags.count, default=32, help="images at a time (default: 32)")
add("--classes", metavar="FILE", help="folder of each class of the network, one a line, where some are not there")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default: float32)")
add("--output", type=flags.output, metavar="CSV", help="a row for each attention")
add(
    "--set",
    nargs="+",
    default=[],
    metavar="KEY=VALUE",
    help="options beyond the name, values in YAML, e.g. keep_ratio=0.5 num_classes=21841",
)

if __name__ == "__main__":
    script(parser, run)
