"""Pictures of scenes with their labels, and with those that some paths of a trained network give them."""

import argparse

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.path_pictures import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--case", required=True, help="case of the experiment paths")
add("--table", required=True, metavar="CSV", help="its rows")
add("--output", type=flags.output, required=True, metavar="NPZ", help="pictures to write")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--set", nargs="+", default=[], dest="stated", metavar="KEY=VALUE", help="settings of the experiment")

if __name__ == "__main__":
    script(parser, run)
