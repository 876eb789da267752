"""Boxes of queries and of their keys: what is chosen from, and what they cover along each axis of a grid."""

from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from tilewright.neighborhood.rule import Axis, extended


class Cover(NamedTuple):
    """What spans of one size cover along an axis, its sub-axes together: keys of all spans, and how many there are."""

    keys: int
    spans: int


class Choice(NamedTuple):
    """A box of queries, the pairs of a query and a key that its products compute for a head, and the time predicted for
    a batch of one, or None."""

    box: tuple[int, ...]
    visited: int
    us: float | None


class Candidate(NamedTuple):
    """A box of queries that a device may choose: its name, pairs visited for a head, the time predicted, in a unit of
    the device, and what `forward` takes as ``form``."""

    name: str
    visited: int
    predicted: float
    form: Any


@lru_cache(4096)
def cover(axis: Axis, length: int, size: int) -> Cover:
    """What spans of `size` queries cover of an axis."""

    def of_length(n):
        lo = np.arange(0, n, size)
        hi = np.minimum(lo + size, n)
        keys = axis.keys(hi - 1, n)[1] - axis.keys(lo, n)[0]
        return np.array([keys.sum(), len(lo)])

    each = [extended(of_length, n, axis.window, lcm(size, axis.stride)) for n in axis.lengths(length)]
    return Cover(*sum(each).tolist())
