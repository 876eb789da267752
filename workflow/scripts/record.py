"""Run a study on this machine for a given time, or continue one, and record its rows in expected/<device>/.

python workflow/scripts/record.py --device h200 --minutes 28
"""

from functools import partial
from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.record import run

if __name__ == "__main__":
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--device", required=True, metavar="NAME", help="name of the recorded run, e.g. h200")
    add(
        "--overlays",
        nargs="*",
        default=[],
        metavar="YAML",
        help="overlays of config.yaml (default: config/<NAME>.yaml, else config/all.yaml)",
    )
    add("--minutes", type=flags.minutes, default=28, help="time for measurements in minutes (default: 28)")
    script(parser, partial(run, checkout=Path(__file__).parents[2]))
