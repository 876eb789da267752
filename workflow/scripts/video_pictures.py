"""Write attention maps of a video network with the chosen keys, and frames of sampled clips.

python workflow/scripts/video_pictures.py --case wan-tiny-480p-81f --output pictures.npz
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.stages.video_pictures import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--case", required=True, help="case of the experiment video")
add("--output", type=flags.output, required=True, metavar="NPZ", help="pictures to write")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--seed", type=flags.seed, default=0, help="seed of clips, noise and planted maps (default: 0)")
set_option(add, "settings of the experiment")

if __name__ == "__main__":
    script(parser, run)
