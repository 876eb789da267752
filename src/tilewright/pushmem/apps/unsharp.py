"""Unsharp mask of an RGB image: the brightness blurred by 5 × 5, and each colour moved away from it."""

from tilewright.pushmem.apps._common import at_least, window
from tilewright.pushmem.dsl import Input, Stage, maximum, minimum

SIZE = 64
ROW = (1, 4, 6, 4, 1)
BINOMIAL_5 = tuple(tuple(a * b for b in ROW) for a in ROW)


def outputs(size: int):
    """sharp, 3 × (size - 4)²."""
    at_least("unsharp", size, 5)
    image = Input("in", (3, size, size), unroll=(0,))
    gray = Stage(
        "gray",
        (size, size),
        lambda y, x: ((image[0, y, x] & 255) * 77 + (image[1, y, x] & 255) * 150 + (image[2, y, x] & 255) * 29) >> 8,
    )
    blur = window("blur", gray, BINOMIAL_5, 8)

    def word(c, y, x):
        moved = ((image[c, y + 2, x + 2] & 255) + gray[y + 2, x + 2] - blur[y, x]).as_signed()
        return minimum(maximum(moved, 0), 255)

    return (Stage("sharp", (3, size - 4, size - 4), word, unroll=(0,)),)
