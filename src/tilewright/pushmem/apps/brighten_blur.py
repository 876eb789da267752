"""Twice as bright, then the mean of 2 × 2: the smallest app with a line of the image in memory."""

from tilewright.pushmem.apps._common import at_least, window
from tilewright.pushmem.dsl import Input, Stage

SIZE = 64


def outputs(size):
    """brighten (size²) and blur ((size - 1)²)."""
    at_least("brighten_blur", size, 2)
    image = Input("in", (size, size))
    bright = Stage("brighten", (size, size), lambda y, x: image[y, x] * 2)
    return (window("blur", bright, ((1, 1), (1, 1)), 2),)
