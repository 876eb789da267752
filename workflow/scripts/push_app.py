"""Compile an app for push memories, configure its tiles, and compare its output with numpy's, in a model and in RTL.

python workflow/scripts/push_app.py --app gaussian-64 --output gaussian
"""

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.push_app import STEPS, run

parser = parser_for(__doc__)
add = parser.add_argument
add("--app", required=True, help="an app and the side of its image, such as gaussian-64")
add("--memory", default="pub", help="kind of memory tile: pub, wide with aggregators, or dp, dual-port (default: pub)")
add("--step", choices=STEPS, help="run one step; the steps that it needs must be done (default: all)")
add("--model-only", action="store_true", help="run the model only, without RTL")
add(
    "--output",
    type=flags.folder,
    required=True,
    metavar="FOLDER",
    help="folder for mapped.json, config.json and run.csv",
)

if __name__ == "__main__":
    script(parser, run)
