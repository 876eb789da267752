"""Corners by Harris and Stephens (1988): gradients, their products summed over 3 × 3, a response, its local maxima."""

from tilewright.pushmem.apps._common import at_least, window
from tilewright.pushmem.dsl import Input, Stage, maximum, select

SIZE = 64
SOBEL_X = ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))
SOBEL_Y = ((-1, -2, -1), (0, 0, 0), (1, 2, 1))
BOX = ((1, 1, 1),) * 3
THRESHOLD = 1


def outputs(size: int):
    """corners, (size - 6)²: 255 where the response is a local maximum above the threshold, else 0."""
    at_least("harris", size, 7)
    image = Input("in", (size, size))
    dx = window("dx", image, SOBEL_X, 0, dtype="int16")
    dy = window("dy", image, SOBEL_Y, 0, dtype="int16")

    def product(name, left, right):
        return Stage(name, left.shape, lambda y, x: (left[y, x] >> 2) * (right[y, x] >> 2) >> 7, dtype="int16")

    sxx = window("sxx", product("dxx", dx, dx), BOX, 0, dtype="int16")
    sxy = window("sxy", product("dxy", dx, dy), BOX, 0, dtype="int16")
    syy = window("syy", product("dyy", dy, dy), BOX, 0, dtype="int16")

    def response(y, x):
        trace = sxx[y, x] + syy[y, x]
        return (sxx[y, x] * syy[y, x] - sxy[y, x] * sxy[y, x]) - (trace * trace >> 4)

    strength = Stage("strength", sxx.shape, response, dtype="int16")

    def corner(y, x):
        around = strength[y, x]
        for i in range(3):
            for j in range(3):
                around = maximum(around, strength[y + i, x + j])
        centre = strength[y + 1, x + 1]
        return select((centre == around) & (centre > THRESHOLD), 255, 0)

    return (Stage("corners", (size - 6, size - 6), corner),)
