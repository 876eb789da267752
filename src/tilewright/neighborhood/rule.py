"""The rule of neighbourhoods: which keys a query sees, and which queries see a key, along each axis of a grid.

Dilation d splits an axis of length L into d sub-axes, of the positions x with one x mod d. Inside of one, indices count
from 0 to n - 1, and the keys of a query are an interval of them. Neither end of it decreases with the query, hence the
queries of a key are an interval, too. The axes' intervals multiply. No torch is needed here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from tilewright.core import arguments
from tilewright.core.errors import PatternError

BORDERS = ("shift", "cut")
# Axes of a grid, at most.
MOST_AXES = 3
# Numbers of values that 64-bit offsets reach.
_OFFSETS = 2**63


@dataclass(frozen=True)
class Axis:
    """The rule along one axis. Queries that share `stride` neighbours share the window of their leader.

    cut: windows end at the borders. Otherwise they are moved inwards and keep their length.
    """

    window: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False
    cut: bool = False

    @property
    def before(self) -> int:
        """Keys of a window that come before its leader."""
        return self.window - 1 if self.causal else self.window // 2

    @property
    def _lead(self):
        """Where in a group of queries its leader stands."""
        return self.stride - 1 if self.causal else self.stride // 2

    def lengths(self, length: int) -> list[int]:
        """Lengths of the sub-axes of an axis, by their first position."""
        return [-(-(length - first) // self.dilation) for first in range(self.dilation)]

    def keys(self, i: Any, n: int) -> tuple[Any, Any]:
        """The keys ``[lo, hi)`` of query `i` of a sub-axis of `n` tokens: ints, or int arrays for an array of queries.

        They are those of NATTEN where borders shift.
        """
        first = np.minimum(i // self.stride * self.stride + self._lead, n - 1) - self.before
        if self.causal:
            return np.maximum(first, 0), np.minimum(i + 1, n)
        if self.cut:
            return np.maximum(first, 0), np.minimum(first + self.window, n)
        first = np.clip(first, 0, n - self.window)
        return first, first + self.window

    def queries(self, j: Any, n: int) -> tuple[Any, Any]:
        """The queries ``[lo, hi)`` that see key `j` of a sub-axis of `n` tokens, as ints or int arrays like `j`."""
        after = self._first(j + 1, n)
        if self.causal:
            return j + 0 * after, after
        return self._first(j + 1 - self.window, n), after

    def _first(self, key, n):
        """The first query whose window, as far as it goes, begins at `key` or later; n where none does."""
        group = -(-(key + self.before - self._lead) // self.stride)
        found = np.clip(group * self.stride, 0, n)
        # Windows of the last queries begin no later than these do.
        last = n - 1 - self.before if self.causal or self.cut else n - self.window
        none = np.where(key > last, n, found)
        return none if self.causal or self.cut else np.where(key <= 0, 0, none)


@dataclass(frozen=True)
class Rule:
    """A rule for grids of some axes: a value each of `window`, `stride`, `dilation` and `causal` for every axis.

    border: ``"shift"`` moves windows inwards at borders, so that all have their full length. ``"cut"`` leaves out keys
    beyond them. `make` checks what users give.
    """

    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    causal: tuple[bool, ...]
    border: str = "shift"

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The rule along each axis."""
        each = zip(self.window, self.stride, self.dilation, self.causal, strict=True)
        return tuple(Axis(*one, cut=self.border == "cut") for one in each)

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raise `PatternError` where the rule does not fit a grid."""
        if len(grid) != len(self.window):
            raise PatternError(f"window: expected {len(grid)} values for the grid {tuple(grid)}, found {self.window}")
        for axis, (n, w, d) in enumerate(zip(grid, self.window, self.dilation, strict=True)):
            if w * d > n:
                spread = f"window {w}" if d == 1 else f"window {w} times dilation {d}"
                raise PatternError(f"window: expected at most the {n} tokens of axis {axis}, found {spread}")

    # Not a cached property, which compilers cannot trace.
    @property
    def ints(self) -> list[int]:
        """The rule as integers, for operators; `from_ints` reads them."""
        return [*self.window, *self.stride, *self.dilation, *map(int, self.causal), int(self.border == "cut")]

    def pairs(self, grid: tuple[int, ...]) -> int:
        """How many pairs of a query and a key a grid has."""
        return prod(_pairs(axis, n) for axis, n in zip(self.axes, grid, strict=True))


def from_ints(values: tuple[int, ...]) -> Rule:
    """The rule that `Rule.ints` describes."""
    n = len(values) // 4
    window, stride, dilation, causal = (tuple(values[n * i : n * (i + 1)]) for i in range(4))
    return Rule(window, stride, dilation, tuple(map(bool, causal)), BORDERS[values[-1]])


def make(axes: int, window: Any, stride: Any, dilation: Any, causal: Any, border: Any) -> Rule:
    """The `Rule` for grids of so many axes, of one value or one for each axis. Raises `PatternError` for others."""
    if axes not in range(1, MOST_AXES + 1):
        raise PatternError(f"grid: expected 1 to {MOST_AXES} axes, found {axes}")
    widths, steps, spread = (
        arguments.sizes(name, _each(value, axes), axes, PatternError)
        for name, value in (("window", window), ("stride", stride), ("dilation", dilation))
    )
    flags = arguments.each(_each(causal, axes)) or ()
    if len(flags) != axes or any(flag is not True and flag is not False for flag in flags):
        raise PatternError(f"causal: expected True or False, or {axes} of them, found {arguments.shown(causal)}")
    arguments.name_of("border", border, BORDERS)
    if any(flags) and border == "cut":
        raise PatternError('border: expected "shift" with a causal axis, found "cut"')
    for w, s in zip(widths, steps, strict=True):
        if s > w:
            raise PatternError(f"stride: expected at most the window {w}, found {s}")
    return Rule(widths, steps, spread, flags, border)


def check_size(grid: tuple[int, ...], *others: int) -> None:
    """Raise `PatternError` for tensors of more values than 64-bit offsets reach."""
    if prod(grid) * prod(others) >= _OFFSETS:
        raise PatternError(f"grid: expected fewer than 2^63 values, found the grid {tuple(grid)} of {others} values")


def _each(value, axes):
    return value if arguments.each(value) is not None else (value,) * axes


def extended(count: Callable, n: int, window: int, period: int) -> Any:
    """``count(n)`` of a sub-axis of `n` tokens, from shorter ones: between borders it repeats itself by `period`."""
    more = max(0, (n - 2 * window) // period - 2)
    if more < 2:
        return count(n)
    short = count(n - more * period)
    return short + more * (count(n - (more - 1) * period) - short)


@lru_cache(1024)
def _pairs(axis, length):
    """Pairs along one axis."""

    def of_length(n):
        lo, hi = axis.keys(np.arange(n), n)
        return int((hi - lo).sum())

    return sum(extended(of_length, n, axis.window, axis.stride) for n in axis.lengths(length))
