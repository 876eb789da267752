"""Boxes of queries and the boxes of their keys, along each axis of a grid."""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from tilewright.neighborhood.rule import Axis, extended


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


class Run(NamedTuple):
    """`repeats` neighbouring spans that differ from `first` in their places alone: keys of each begin `step` later."""

    first: Span
    repeats: int
    step: int


class Cover(NamedTuple):
    """What spans of one size cover along an axis, its sub-axes together: pairs of a query and a key of one span, keys
    of all spans, how many spans there are, and how many runs of them."""

    pairs: int
    keys: int
    spans: int
    runs: int


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


@lru_cache(64)
def spans(axis: Axis, n: int, size: int) -> tuple[Span, ...]:
    """A sub-axis of `n` tokens in spans of `size` queries; the last one may be shorter."""
    ends = np.stack([np.broadcast_to(x, n) for x in axis.keys(np.arange(n), n)], -1)
    # Nearly all are alike: they are told apart by their bytes, and held once.
    known: dict[bytes, tuple] = {}
    made = []
    for lo in range(0, n, size):
        key_lo, seen = int(ends[lo, 0]), ends[lo : lo + size] - ends[lo, 0]
        if (name := seen.tobytes()) not in known:
            known[name] = tuple(map(tuple, seen.tolist()))
        made.append(Span(lo, lo + len(seen), key_lo, key_lo + int(seen[-1, 1]), known[name]))
    return tuple(made)


@lru_cache(1024)
def runs(part: tuple[Span, ...]) -> tuple[Run, ...]:
    """Neighbouring spans as runs, as few as there are from the first one on."""
    made: list[Run] = []
    for span in part:
        last = made[-1] if made else None
        if last is not None and (last.first.seen, last.first.keys) == (span.seen, span.keys):
            step = span.key_lo - last.first.key_lo - (last.repeats - 1) * last.step
            if last.repeats == 1 or step == last.step:
                made[-1] = Run(last.first, last.repeats + 1, step)
                continue
        made.append(Run(span, 1, 0))
    return tuple(made)


@lru_cache(4096)
def cover(axis: Axis, length: int, size: int) -> Cover:
    """What spans of `size` queries cover of an axis."""

    def of_length(n):
        lo = np.arange(0, n, size)
        hi = np.minimum(lo + size, n)
        keys = axis.keys(hi - 1, n)[1] - axis.keys(lo, n)[0]
        return np.array([(keys * (hi - lo)).sum(), keys.sum(), len(lo), len(runs(spans(axis, n, size)))])

    each = [extended(of_length, n, axis.window, lcm(size, axis.stride)) for n in axis.lengths(length)]
    return Cover(*sum(each).tolist())
