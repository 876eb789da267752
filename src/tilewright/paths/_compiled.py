"""Labels that maps give to pixels on a CPU, compiled by numba: maps are never there at that size.

Between four neighbours of a map that give one class the largest logit every pixel has that class: weights of bilinear
interpolation are not negative, and rounding keeps order. Logits are interpolated for all other pixels alone.
"""

import numpy as np
from numba import float32, int32, int64, types, uint8

from tilewright.core.compiled import njit

_I1, _F1 = int32[::1], float32[::1]
_ONE = np.float32(1)


@njit(int64(float32[::1]), cache=True, nogil=True)
def largest(logits):
    """The index of the largest logit, of equal ones the first."""
    best = 0
    for i in range(1, len(logits)):
        if logits[i] > logits[best]:
            best = i
    return best


@njit(types.void(float32[:, :, ::1], _I1, _F1, _I1, _F1, uint8[:, ::1]), cache=True, nogil=True)
def label(maps, tops, downs, lefts, alongs, found):
    """Write to `found` [H, W] the class that maps [h, w, classes] give each pixel, of at most 256.

    tops [H], lefts [W]: the row of the map above a pixel and the column left of it, -1 for none; downs, alongs: how far
    behind them it lies, in 0..1.
    """
    height, width, classes = maps.shape
    near = np.empty((height, width), np.int64)
    for y in range(height):
        for x in range(width):
            near[y, x] = largest(maps[y, x])
    logits = np.empty(classes, np.float32)
    for y in range(len(tops)):
        top, down = max(tops[y], 0), downs[y]
        bottom = min(tops[y] + 1, height - 1)
        for x in range(len(lefts)):
            left, along = max(lefts[x], 0), alongs[x]
            right = min(lefts[x] + 1, width - 1)
            best = near[top, left]
            if best != near[top, right] or best != near[bottom, left] or best != near[bottom, right]:
                for i in range(classes):
                    above = maps[top, left, i] * (_ONE - along) + maps[top, right, i] * along
                    below = maps[bottom, left, i] * (_ONE - along) + maps[bottom, right, i] * along
                    logits[i] = above * (_ONE - down) + below * down
                best = largest(logits)
            found[y, x] = best
