"""A 3 × 3 convolution of eight channels to eight, as in the layers of ResNet; the side is that of the output."""

from tilewright.pushmem.dsl import Input, Reduce, Stage

SIZE = 28
CHANNELS = 8


def outputs(size: int):
    """sums, 8 × size²; 8 × 8 multiplications are done in space, nine in time."""
    image = Input("in", (CHANNELS, size + 2, size + 2), unroll=(0,))
    weights = Input("weights", (CHANNELS, CHANNELS, 3, 3), unroll=(0, 1))

    def sums(c, y, x):
        return Reduce((CHANNELS, 3, 3), lambda k, ry, rx: image[k, y + ry, x + rx] * weights[c, k, ry, rx], unroll=(0,))

    return (Stage("sums", (CHANNELS, size, size), sums, unroll=(0,), order="auto"),)
