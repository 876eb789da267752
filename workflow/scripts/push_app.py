"""Compile a program for push memories, configure its tiles, and compare its output with numpy's, in a model and in RTL.

The program is an app of the study, or one in a file of Python: stages, or a function that gives them for a size.

python workflow/scripts/push_app.py --program mine.py:outputs --size 64 --memory pub --rtl --output mine
"""

import argparse

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.push_app import STEPS, run

parser = parser_for(__doc__)
add = parser.add_argument
add("--app", help="an app and the side of its image, such as gaussian-64")
add("--program", metavar="FILE.py:NAME", help="a program in a file: stages, or a function of a size")
add("--size", type=flags.count, help="what the function of --program is called with (default: nothing)")
add("--image", action="append", metavar="[NAME=]FILE", help="an input: a .npy or an image (default: random words)")
add("--numpy", dest="definition", metavar="FILE.py:NAME", help="compare with a function of arrays, too")
add("--memory", default="pub", help="kind of memory tile: pub, wide with aggregators, or dp, dual-port (default: pub)")
add("--step", choices=STEPS, help="run one step; the steps that it needs must be done (default: all)")
add("--rtl", action=argparse.BooleanOptionalAction, default=True, help="run the RTL after the model (default: yes)")
add(
    "--output",
    type=flags.folder,
    required=True,
    metavar="FOLDER",
    help="folder for mapped.json, config.json, run.csv, and the words of each output of --program, STAGE.npy",
)

if __name__ == "__main__":
    script(parser, run)
