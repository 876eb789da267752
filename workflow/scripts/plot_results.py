"""Draw all figures that the results in a folder suffice for: the published artifact's command. `draw.py` draws one.

python workflow/scripts/plot_results.py --input results/logs --output figures
"""

from functools import partial
from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.results import run

if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("--input", required=True, metavar="FOLDER", help="logs of a run, e.g. results/logs")
    parser.add_argument(
        "--output", type=flags.folder, required=True, metavar="FOLDER", help="folder to write the figures to"
    )
    script(parser, partial(run, "figures", checkout=Path(__file__).parents[2]))
