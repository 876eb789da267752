"""Columns of an image, once all of it is there."""

import numpy as np

from tilewright.pushmem.examples import raster, sizes

NAMING = "transposed-<width>x<height>, such as transposed-16x16"
DELAY = 8


def parse(text: str):
    """``(width, height)``."""
    return sizes(text, 2)


def moves(width: int, height: int):
    """See the family."""
    count = width * height
    words = np.arange(count).reshape(height, width).T.reshape(-1)
    return raster(width, height), [(count + DELAY + np.arange(count), words)]
