"""Boxes of queries and the boxes of their keys, along each axis of a grid."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.neighborhood.rule import Axis


@dataclass(frozen=True)
class Span:
    """Neighbouring queries ``[lo, hi)`` of a sub-axis and ``[key_lo, key_hi)``, the keys that any of them sees.

    seen: for each query its first key and the end of its keys, counted from ``key_lo``.
    """

    lo: int
    hi: int
    key_lo: int
    key_hi: int
    seen: tuple[tuple[int, int], ...]

    @property
    def queries(self) -> int:
        """How many there are."""
        return self.hi - self.lo

    @property
    def keys(self) -> int:
        """How many there are."""
        return self.key_hi - self.key_lo

    def allowed(self) -> np.ndarray:
        """Bool [queries, keys]: which query sees which key."""
        key, (lo, hi) = np.arange(self.keys), np.array(self.seen).T
        return (lo[:, None] <= key) & (key < hi[:, None])


@lru_cache(256)
def spans(axis: Axis, n: int, size: int) -> tuple[Span, ...]:
    """A sub-axis of `n` tokens in spans of `size` queries; the last one may be shorter."""
    first, end = (np.broadcast_to(x, n).tolist() for x in axis.keys(np.arange(n), n))
    made = []
    for lo in range(0, n, size):
        hi = min(lo + size, n)
        key_lo, key_hi = first[lo], end[hi - 1]
        seen = tuple((first[i] - key_lo, end[i] - key_lo) for i in range(lo, hi))
        made.append(Span(lo, hi, key_lo, key_hi, seen))
    return tuple(made)
