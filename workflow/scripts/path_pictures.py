"""Write pictures of scenes with their labels, and with the labels that paths of a trained network give them.

python workflow/scripts/path_pictures.py --case segformer-b0-512 --table paths.csv --output pictures.npz
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.stages.path_pictures import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--case", required=True, help="case of the experiment paths")
add("--table", required=True, metavar="CSV", help="rows of the case")
add("--output", type=flags.output, required=True, metavar="NPZ", help="pictures to write")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
set_option(add, "settings of the experiment")

if __name__ == "__main__":
    script(parser, run)
