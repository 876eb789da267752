"""Every so many words of every so many rows, in the raster of the image that comes in."""

import numpy as np

from tilewright.pushmem.examples import raster, sizes

NAMING = "strided-<step>-<width>x<height>, such as strided-2-32x32"
DELAY = 10


def parse(text: str):
    """``(step, width, height)``."""
    found = sizes(text, 3)
    return found if found and found[0] >= 2 else None


def moves(step: int, width: int, height: int):
    """See the family."""
    arrivals = raster(width, height)
    words = np.arange(width * height).reshape(height, width)[::step, ::step].reshape(-1)
    return arrivals, [(arrivals[words] + DELAY, words)]
