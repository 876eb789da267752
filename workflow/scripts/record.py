"""T5: run a study on this machine in so many minutes, or go on with it, and record its rows as expected/<device>/."""

import argparse
from functools import partial
from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.record import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", required=True, metavar="NAME", help="what the recorded run is called, e.g. h200")
    add(
        "--overlays",
        nargs="*",
        default=[],
        metavar="YAML",
        help="of config.yaml (default: config/<NAME>.yaml, else config/all.yaml)",
    )
    add("--minutes", type=flags.minutes, default=28, help="time to measure in (default: 28)")
    script(parser, partial(run, checkout=Path(__file__).parents[2]))
