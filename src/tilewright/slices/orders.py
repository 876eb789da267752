"""Orders of the tokens of a 3-D grid, so that consecutive queries lie close together and want the same keys.

A grid is ``(frames, rows, columns)``; tokens are numbered in raster order, the columns fastest. An order is int64
[tokens], ``order[new] = old``. It is applied once, to latents and rotary tables on entry, and undone on exit.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tilewright.core import registry
from tilewright.core.errors import PatternError

# Tokens of a voxel by default: queries of a group.
VOXEL = 128


def order(name: str, grid: Sequence[int]) -> NDArray[np.int64]:
    """The order `name`, of `NAMES`, of the tokens of `grid`.

    Raises `UnknownNameError`, and `PatternError` for a grid that is not of three sizes of at least 1.
    """
    registry.check("order of tokens", name, NAMES)
    return _NAMED[name](grid)


def raster(grid: Sequence[int]) -> NDArray[np.int64]:
    """Frame by frame, row by row. Raises `PatternError` as `order`."""
    return np.arange(np.prod(_checked(grid)), dtype=np.int64)


def voxel(grid: Sequence[int], tokens: int = VOXEL) -> NDArray[np.int64]:
    """Box by box of at most `tokens` tokens, each in raster order. Raises `PatternError` as `order`."""
    return np.concatenate([box.ravel() for box in _boxes(_checked(grid), tokens)])


def hilbert(grid: Sequence[int]) -> NDArray[np.int64]:
    """Along a curve that visits neighbours one after another, for a grid of any sizes. Raises `PatternError` as
    `order`.

    As in Hilbert's curve a box is cut in parts that are visited whole, one after another, from corner to corner; here
    in two along a long side, again and again, instead of in eight of equal size. Steps alternate between two colours,
    as on a chess board, hence not every corner can be the last one; cuts and corners are chosen among those that can.
    Every step is to a neighbour, whatever the sizes.
    """
    sizes = _checked(grid)
    exits = sorted(product((1, 0), repeat=3), key=sum)
    curve = next(found for to in exits if (found := _curve(sizes, to)) is not None)
    return np.ravel_multi_index(tuple(curve.T), sizes).astype(np.int64)


_NAMED: dict[str, Callable] = {"raster": raster, "voxel": voxel, "hilbert": hilbert}
NAMES = tuple(_NAMED)


def _checked(grid: Sequence[int]) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in grid)
    if len(sizes) != 3 or min(sizes) < 1:
        raise PatternError(f"grid: expected three sizes of at least 1, frames, rows, columns, found {list(grid)}")
    return sizes


def _boxes(grid: tuple[int, int, int], tokens: int) -> Iterator[NDArray[np.int64]]:
    """The boxes of `voxel`, of nearly equal sizes along each axis. They come back and forth: a group of queries that
    begins in one box ends in one beside it."""
    if tokens < 1:
        raise PatternError(f"tokens of a voxel: expected at least 1, found {tokens}")
    parts = _parts(grid, tokens)
    numbers = np.arange(np.prod(grid), dtype=np.int64).reshape(grid)
    bars, boxes = 1, 1
    for slab in np.array_split(numbers, parts[0], 0):
        bars = -bars
        for bar in np.array_split(slab, parts[1], 1)[::-bars]:
            boxes = -boxes
            yield from np.array_split(bar, parts[2], 2)[::-boxes]


def _parts(grid: tuple[int, int, int], tokens: int) -> tuple[int, int, int]:
    """Into how many parts each axis is cut: as few and as compact boxes as their limit allows."""

    def surface(parts: tuple[int, ...]) -> float:
        t, h, w = np.divide(grid, parts)
        return float(np.prod(parts) * (t * h + h * w + t * w))

    def choices(size: int) -> list[int]:
        # The fewest parts for each length of the longest one.
        return sorted({-(-size // length) for length in range(1, min(size, tokens) + 1)})

    allowed = [
        (t, h, w)
        for t, h, w in product(*map(choices, grid))
        if -(-grid[0] // t) * -(-grid[1] // h) * -(-grid[2] // w) <= tokens
    ]
    return min(allowed, key=surface)


@cache
def _curve(sizes: tuple[int, ...], to: tuple[int, ...]) -> NDArray[np.int64] | None:
    """int64 [tokens, 3]: a path of neighbours through all of a box, from its first corner to the one that differs from
    it along the axes with 1 in `to`; None where there is none. The result is shared, hence read-only."""
    to = tuple(along if size > 1 else 0 for along, size in zip(to, sizes, strict=True))
    if not _joined(sizes, to):
        return None
    if max(sizes) == 1:
        return _frozen(np.zeros((1, 3), np.int64))
    for axis, cut, via in _cuts(sizes, to):
        near, far = list(sizes), list(sizes)
        near[axis], far[axis] = cut, sizes[axis] - cut
        # The second half begins beside the end of the first one: there, along the other axes, and ends at `to`.
        back = tuple(a ^ b for a, b in zip(to, via, strict=True))
        rest = tuple(1 if at == axis else back[at] for at in range(3))
        first = _curve(tuple(near), via)
        second = None if first is None else _curve(tuple(far), rest)
        if second is not None:
            turned = [at != axis and via[at] == 1 for at in range(3)]
            second = np.where(turned, np.subtract(sizes, 1) - second, second)
            second[:, axis] += cut
            return _frozen(np.concatenate([first, second]))
    return None


def _joined(sizes: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether the colours of the corners allow a path, see `hilbert`."""
    if np.prod(sizes) % 2:
        return True
    return sum(along for along, size in zip(to, sizes, strict=True) if size % 2 == 0) % 2 == 1


def _cuts(sizes: tuple[int, ...], to: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """``(axis, cut, via)``: ways to cut a box in two, the best first, and the corner where the first half ends.

    The curve ends in the second half, hence the axis is one of those in `to`. The longest is cut, near its middle;
    halves are left at the corner that lets them be cut along their own longest side next.
    """
    axes = sorted((axis for axis in range(3) if to[axis]), key=lambda axis: -sizes[axis])
    for axis in axes:
        half = sizes[axis] / 2
        for cut in sorted(range(1, sizes[axis]), key=lambda cut: abs(cut - half)):
            vias = [via for via in product((0, 1), repeat=3) if via[axis] == 1]
            others = [at for at in range(3) if at != axis]
            longest = max(others, key=lambda at: sizes[at])
            yield from ((axis, cut, via) for via in sorted(vias, key=lambda via: (1 - via[longest], sum(via))))


def _frozen(curve: NDArray[np.int64]) -> NDArray[np.int64]:
    curve.flags.writeable = False
    return curve
