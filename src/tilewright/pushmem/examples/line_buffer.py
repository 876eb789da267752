"""Rows of a stencil: while a row comes in, the rows above it come out, each on an output of its own."""

import numpy as np

from tilewright.pushmem.examples import raster, sizes

NAMING = "line_buffer-<rows>-<width>x<height>, of 2 or 3 rows, such as line_buffer-3-28x28"
# Of the newest row, which does not go through the tile, and of its registers.
DELAY = 2


def parse(text: str):
    """``(rows, width, height)``: of a stencil of so many rows, all but the newest."""
    found = sizes(text, 3)
    return found if found and found[0] >= 2 and found[2] >= found[0] else None


def moves(rows, width, height):
    """See the family."""
    shown = height - rows + 1
    at = raster(width, shown, start=(rows - 1) * width + DELAY)
    words = np.arange(shown * width)
    return raster(width, height), [(at, words + width * above) for above in reversed(range(rows - 1))]
