"""Labels that maps give to pixels, counted on a CPU, compiled by numba: maps are never there at the size of the labels.

Between four neighbours of a map that give one class the largest logit every pixel has that class: weights of bilinear
interpolation are not negative, and rounding keeps order. Logits are interpolated for all other pixels alone.
"""

import numpy as np
from numba import float32, int64, types, uint8

from tilewright.core.compiled import njit

_I1, _F1, _I2 = int64[::1], float32[::1], int64[:, ::1]
_ONE = np.float32(1)


@njit(int64(float32[::1]), cache=True, nogil=True)
def largest(logits):
    """The index of the largest logit, of equal ones the first."""
    best = 0
    for i in range(1, len(logits)):
        if logits[i] > logits[best]:
            best = i
    return best


@njit(types.void(float32[:, :, ::1], uint8[:, ::1], _I1, _F1, _I1, _F1, _I2), cache=True, nogil=True)
def count(maps, labels, tops, downs, lefts, alongs, counts):
    """Add to `counts` [classes, classes] the pixels of each label [H, W] that maps [h, w, classes] give each class.

    tops [H], lefts [W]: the row of the map above a pixel and the column left of it; downs, alongs: how far behind them
    it lies, in 0..1. Pixels of other labels do not count.
    """
    height, width, classes = maps.shape
    near = np.empty((height, width), np.int64)
    for y in range(height):
        for x in range(width):
            near[y, x] = largest(maps[y, x])
    logits = np.empty(classes, np.float32)
    for y in range(len(tops)):
        top, down = tops[y], downs[y]
        bottom = min(top + 1, height - 1)
        for x in range(len(lefts)):
            label = labels[y, x]
            if label >= classes:
                continue
            left, along = lefts[x], alongs[x]
            right = min(left + 1, width - 1)
            found = near[top, left]
            if found != near[top, right] or found != near[bottom, left] or found != near[bottom, right]:
                for i in range(classes):
                    above = maps[top, left, i] * (_ONE - along) + maps[top, right, i] * along
                    below = maps[bottom, left, i] * (_ONE - along) + maps[bottom, right, i] * along
                    logits[i] = above * (_ONE - down) + below * down
                found = largest(logits)
            counts[label, found] += 1


def places(side: int, whole: int) -> tuple[np.ndarray, np.ndarray]:
    """Of `whole` pixels the neighbour before each, int64, and how far behind it they lie, float32, among `side`."""
    at = np.maximum((np.arange(whole) + 0.5) * (side / whole) - 0.5, 0)
    before = np.minimum(at.astype(np.int64), side - 1)
    return before, (at - before).astype(np.float32)
