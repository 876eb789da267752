"""Attention maps of a video network with the keys that were chosen, and frames of sampled clips, for figures."""

import argparse

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.video_pictures import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--case", required=True, help="case of the experiment video")
add("--output", type=flags.output, required=True, metavar="NPZ", help="pictures to write")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, default=0, help="of clips, noise and planted maps (default: 0)")
add("--set", nargs="+", default=[], dest="stated", metavar="KEY=VALUE", help="settings of the experiment")

if __name__ == "__main__":
    script(parser, run)
