"""Compile an app for push memories, configure its tiles, and run it against numpy, in a model and in RTL."""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.push_app import STEPS, run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--app", required=True, help="an app and the side of its image, such as gaussian-64")
add("--memory", default="pub", help="the tile, pub or dp (default: pub)")
add("--step", choices=STEPS, help="only map, configure or run, after the steps before it (default: all)")
add("--model-only", action="store_true", help="do not build and run the RTL")
add("--output", type=flags.folder, required=True, metavar="FOLDER", help="mapped.json, config.json and run.csv")

if __name__ == "__main__":
    script(parser, run)
