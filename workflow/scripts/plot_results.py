"""T6: make every figure that a folder's rows suffice for. Command of the published artifact; `draw.py` makes one."""

import argparse
from functools import partial
from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.results import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, metavar="FOLDER", help="logs of a run, e.g. results/logs")
    parser.add_argument(
        "--output", type=flags.folder, required=True, metavar="FOLDER", help="folder to write the figures to"
    )
    script(parser, partial(run, "figures", checkout=Path(__file__).parents[2]))
