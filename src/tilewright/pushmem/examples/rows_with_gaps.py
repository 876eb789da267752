"""Rows with a gap behind each, as a stage of a cascade gives them, and the row above beside them."""

import numpy as np

from tilewright.pushmem.examples import raster, sizes

NAMING = "rows_with_gaps-<gap>-<width>x<height>, such as rows_with_gaps-2-62x62"
DELAY = 2


def parse(text: str):
    """``(gap, width, height)``."""
    found = sizes(text, 3)
    return found if found and found[2] >= 3 else None


def moves(gap, width: int, height: int):
    """See the family."""
    pitch = width + gap
    at = raster(width, height - 2, pitch, start=2 * pitch + DELAY)
    words = np.arange(width * (height - 2))
    return raster(width, height, pitch), [(at, words + width), (at, words)]
