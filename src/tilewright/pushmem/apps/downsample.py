"""The mean of each 2 × 2 square of the image."""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Stage

SIZE = 64


def outputs(size: int):
    """smaller, (size // 2)²."""
    at_least("downsample", size, 2)
    image = Input("in", (size, size))

    def mean(y, x):
        total = image[2 * y, 2 * x] + image[2 * y, 2 * x + 1] + image[2 * y + 1, 2 * x] + image[2 * y + 1, 2 * x + 1]
        return total >> 2

    return (Stage("smaller", (size // 2, size // 2), mean),)
