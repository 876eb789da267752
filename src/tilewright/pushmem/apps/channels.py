"""A 3 × 3 convolution whose output channels follow each other in time; the side is the output's.

The image is read anew for every channel, and kept whole.
"""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Reduce, Stage

SIZE = 62
CHANNELS = 4


def outputs(size: int):
    """channels, 4 x size x size; the weights are data."""
    at_least("channels", size, 4)
    image, weights = Input("in", (size + 2, size + 2)), Input("weights", (CHANNELS, 3, 3))
    return (
        Stage(
            "channels",
            (CHANNELS, size, size),
            lambda c, y, x: Reduce((3, 3), lambda ry, rx: image[y + ry, x + rx] * weights[c, ry, rx]),
        ),
    )
