"""T6: draw a figure from the files it needs."""

import argparse

from tilewright.core import flags
from tilewright_study import figures
from tilewright_study.cli import script


def run(figure, inputs, outputs):
    figures.draw(figure, inputs, outputs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", required=True, help=f"figure: {', '.join(figures.NAMES)}")
    parser.add_argument("--inputs", required=True, nargs="+", metavar="FILE", help="what the figure is drawn from")
    parser.add_argument(
        "--outputs",
        type=flags.output,
        required=True,
        nargs="+",
        metavar="FILE",
        help="files to write: .svg, .png, .pdf, .json (its origin)",
    )
    script(parser, run)
