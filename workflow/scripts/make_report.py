"""T6: put all figures and tables, with the tile explorer, into one HTML file."""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.report import page


def run(figures, tables, explored, recorded, output):
    page.write(figures, tables, explored, output, recorded)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--figures", nargs="*", default=[], metavar="SVG", help="figures, each with its origin beside it")
    add("--tables", nargs="*", default=[], metavar="CSV", help="tables, each with its origin beside it")
    add("--explored", nargs="*", default=[], metavar="FILE", help="graphs, blocks, profiles and schedules to explore")
    add("--recorded", nargs="*", default=[], metavar="CSV", help="claims, the paper's bars, rows of a recorded run")
    add("--output", type=flags.output, required=True, metavar="HTML", help="the page to write")
    script(parser, run)
