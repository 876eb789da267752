"""Two 3 × 3 convolutions of two channels, one after the other, for four images; the side is that of the last outputs.

While the second works on an image, the first works on the next one: what is between them is held twice.
"""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Reduce, Stage

SIZE = 16
IMAGES, CHANNELS = 4, 2


def outputs(size: int):
    """second, 4 × 2 × size x size; the weights of both are data."""
    at_least("layers", size, 4)
    image = Input("in", (IMAGES, CHANNELS, size + 4, size + 4), unroll=(1,))
    first = _convolution("first", image, size + 2)
    return (_convolution("second", first, size),)


def _convolution(name, source, size):
    weights = Input(f"weights_{name}", (CHANNELS, CHANNELS, 3, 3), unroll=(0, 1))

    def sums(b, c, y, x):
        products = lambda k, ry, rx: source[b, k, y + ry, x + rx] * weights[c, k, ry, rx]  # noqa: E731
        return Reduce((CHANNELS, 3, 3), products, unroll=(0,))

    return Stage(name, (IMAGES, CHANNELS, size, size), sums, unroll=(1,))
