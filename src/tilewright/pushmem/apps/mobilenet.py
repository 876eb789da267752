"""A depthwise 3 × 3 convolution and a pointwise one of four channels, as in MobileNet; the side is the output's."""

from tilewright.pushmem.dsl import Input, Reduce, Stage

SIZE = 28
CHANNELS = 4
POINTWISE = tuple(tuple((7 * o + 3 * i) % 11 - 5 for i in range(CHANNELS)) for o in range(CHANNELS))


def outputs(size: int):
    """pointwise, 4 × size²; the depthwise weights are data, the pointwise ones constants."""
    image = Input("in", (CHANNELS, size + 2, size + 2), unroll=(0,))
    weights = Input("weights", (CHANNELS, 3, 3), unroll=(0,))
    depthwise = Stage(
        "depthwise",
        (CHANNELS, size, size),
        lambda c, y, x: Reduce((3, 3), lambda ry, rx: image[c, y + ry, x + rx] * weights[c, ry, rx]),
        unroll=(0,),
        order="auto",
    )

    def pointwise(c, y, x):
        total = 0
        for k in range(CHANNELS):
            total = depthwise[k, y, x] * POINTWISE[c][k] + total
        return total

    return (Stage("pointwise", (CHANNELS, size, size), pointwise, unroll=(0,)),)
