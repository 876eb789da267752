"""Words come out as they came in, some cycles later."""

import numpy as np

from tilewright.pushmem.examples import raster, sizes

NAMING = "identity-<width>x<height>, such as identity-16x16"
# The least that four words at a time allow: they fill, are written and read, and go out.
DELAY = 7


def parse(text: str):
    """``(width, height)``."""
    return sizes(text, 2)


def moves(width: int, height: int):
    """See the family."""
    arrivals = raster(width, height)
    return arrivals, [(arrivals + DELAY, np.arange(len(arrivals)))]
