"""One level of a Laplacian pyramid: the image less what a level of half its side keeps."""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Stage

SIZE = 64


def outputs(size: int):
    """detail, (2 (size // 2))², and coarse, (size // 2)²."""
    at_least("pyramid", size, 2)
    image = Input("in", (size, size))
    half = size // 2

    def mean(y, x):
        total = image[2 * y, 2 * x] + image[2 * y, 2 * x + 1] + image[2 * y + 1, 2 * x] + image[2 * y + 1, 2 * x + 1]
        return total >> 2

    coarse = Stage("coarse", (half, half), mean)
    detail = Stage("detail", (2 * half, 2 * half), lambda y, x: image[y, x] - coarse[y // 2, x // 2], dtype="int16")
    return detail, coarse
