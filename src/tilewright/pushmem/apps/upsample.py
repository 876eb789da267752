"""Each word of the image in 2 × 2 places."""

from tilewright.pushmem.dsl import Input, Stage

SIZE = 64


def outputs(size):
    """larger, (2 size)²."""
    image = Input("in", (size, size))
    return (Stage("larger", (2 * size, 2 * size), lambda y, x: image[y // 2, x // 2]),)
