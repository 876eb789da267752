"""Columns of boxes: the work of a CPU's workers, where its tokens lie, and their copies.

Boxes in a row along the first axis are a column: its keys are copied once, and those of each box are a view of the
copy. All types are computed in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from threading import local
from typing import Any

import torch
from torch import Tensor

from tilewright.neighborhood.boxes import Run, Span, spans
from tilewright.neighborhood.rule import Rule

# Keys and values that a worker copies at a time, a share of the last-level cache.
_COLUMN_BYTES = 8 << 20
# Columns for each worker, at least, where there are as many.
_PARTS = 4
_PLACE: Any = {"dtype": torch.float32, "device": "cpu"}


@dataclass(frozen=True)
class Column:
    """A column of boxes of one image: `along` the first axis, `across` the others; `heads` of keys.

    color: columns of one color share no keys.
    """

    entry: int
    heads: slice
    along: tuple[Span, ...]
    across: tuple[Span, ...]
    color: tuple[int, ...]

    @property
    def keys(self) -> tuple:
        """Where the keys of the column lie in a tensor [B, *grid, H_kv, D]."""
        ends = slice(self.along[0].key_lo, self.along[-1].key_hi)
        return self.entry, ends, *(slice(one.key_lo, one.key_hi) for one in self.across), self.heads

    def queries(self, run: Run, group: int) -> tuple:
        """Where the queries of a run lie in a tensor [B, *grid, H, ...], of `group` heads for each head of keys."""
        ends = slice(run.first.lo, run.first.lo + run.repeats * run.first.queries)
        heads = slice(self.heads.start * group, self.heads.stop * group)
        return self.entry, ends, *(slice(one.lo, one.hi) for one in self.across), heads

    def mask(self, run: Run, group: int) -> Tensor | None:
        """What is added to the scores of each box of a run, float32 [group * M, N]: -inf where a query does not see a
        key. None where all see all."""
        return _mask(tuple((one.seen, one.keys) for one in (run.first, *self.across)), group)

    def windows(self, x: Tensor, run: Run) -> Tensor:
        """Keys of each box of a run, [boxes, H_kv, N, D]: a view of the column's, [H_kv, *grid, D]."""
        layer, width = x.stride(1), x.shape[-1]
        shape = run.repeats, x.shape[0], run.first.keys * layer // width, width
        begin = (run.first.key_lo - self.along[0].key_lo) * layer
        return x.as_strided(shape, (run.step * layer, x.stride(0), width, 1), begin)


class Memory(local):
    """Memory of each worker by name, used again by its next column: new pages take longer to get than to fill."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Contiguous float32 memory, with what was there before."""
        size = prod(shape)
        held = self._held.get(name)
        if held is None or len(held) < size:
            held = self._held[name] = torch.empty(size, **_PLACE)
        return held[:size].view(shape)

    def copy(self, name: str, x: Tensor, width: int) -> Tensor:
        """A contiguous copy of `x` with so many values in each row, zeros after its own."""
        made = self.take(name, *x.shape[:-1], width)
        made[..., : x.shape[-1]] = x
        made[..., x.shape[-1] :] = 0
        return made

    def keys(self, name: str, x: Tensor, width: int) -> Tensor:
        """A copy [H_kv, *grid, D] of a column's keys [*grid, H_kv, D]."""
        return self.copy(name, x.movedim(-2, 0), width)

    def queries(self, name: str, x: Tensor, run: Run, group: int, width: int) -> Tensor:
        """A copy of a run's queries [tokens, ..., H, D] as rows of its boxes, [boxes, H_kv, group * M, D]."""
        return self.copy(name, by_box(x, run, group), width).flatten(2, -2)


def by_box(x: Tensor, run: Run, group: int) -> Tensor:
    """Queries [tokens, ..., H, D] of the boxes of a run as [boxes, H_kv, group, *box, D]: a view."""
    return x.unflatten(0, (run.repeats, -1)).unflatten(-2, (-1, group)).movedim((-3, -2), (1, 2))


def put(place: Tensor, run: Run, group: int, rows: Tensor) -> None:
    """Write rows [boxes, H_kv, group * M, D] to queries, see `by_box`."""
    boxes = by_box(place, run, group)
    boxes.copy_(rows.reshape(boxes.shape))


def inside(rule: Rule) -> Iterator[tuple]:
    """Where each grid of sub-axes lies in tensors [B, *grid, ...]."""
    for first in product(*map(range, rule.dilation)):
        yield slice(None), *(slice(x, None, d) for x, d in zip(first, rule.dilation, strict=True))


def columns(rule: Rule, box: tuple[int, ...], k: Tensor, width: int, threads: int, apart: bool = False) -> list[Column]:
    """The columns of a grid of sub-axes with keys k [B, *grid, H_kv, D], copied in rows of `width` values.

    apart: only those of one color run side by side.
    """
    batch, *grid, kv_heads, _ = k.shape
    along, *across = (spans(*one) for one in zip(rule.axes, grid, box, strict=True))
    held = held_tokens(width, prod(max(one.keys for one in axis) for axis in across))
    count = length(held, along[0].keys, box[0])
    parts = [along[begin : begin + count] for begin in range(0, len(along), count)]
    colors = [_colors([(part[0].key_lo, part[-1].key_hi) for part in parts])]
    colors += [_colors([(one.key_lo, one.key_hi) for one in axis]) for axis in across]
    places = batch * len(parts) * prod(map(len, across))
    if apart:
        places = max(1, places // prod(max(one) + 1 for one in colors))
    heads = side_by_side(held, grid[0], places, kv_heads, threads)
    made = []
    for entry, first in product(range(batch), range(0, kv_heads, heads)):
        some = slice(first, min(first + heads, kv_heads))
        for part, color in zip(parts, colors[0], strict=True):
            for column, others in zip(product(*across), product(*colors[1:]), strict=True):
                made.append(Column(entry, some, part, column, (color, *others)))
    return made


def held_tokens(width: int, across: float) -> int:
    """How long a column may be, in tokens of the first axis, with so many keys across."""
    return max(1, int(_COLUMN_BYTES / (8 * width * across)))


def length(held: int, keys: float, side: int) -> int:
    """Boxes of a column, each `side` long with so many keys along it; those of the first are there anyway."""
    return max(1, int(held - keys) // side)


def side_by_side(held: int, tokens: int, places: int, kv_heads: int, threads: int) -> int:
    """Heads of a column: as many as are held and leave columns enough for all workers."""
    return max(1, min(held // tokens, places * kv_heads // (_PARTS * threads), kv_heads))


def _colors(intervals):
    """A color for each of some intervals, which begin in order: the least of none that overlaps it."""
    ends: list = []
    found = []
    for lo, hi in intervals:
        color = next((i for i, end in enumerate(ends) if end <= lo), len(ends))
        ends[color : color + 1] = [hi]
        found.append(color)
    return found


@lru_cache(32)
def _mask(axes, group):
    each = [Span(0, len(seen), 0, keys, seen).allowed() for seen, keys in axes]
    if all(one.all() for one in each):
        return None
    total, n = torch.zeros((), **_PLACE), len(each)
    for axis, one in enumerate(each):
        added = torch.zeros(one.shape, **_PLACE).masked_fill_(torch.from_numpy(~one), -torch.inf)
        shape = [1] * 2 * n
        shape[axis], shape[n + axis] = one.shape
        total = total + added.view(shape)
    rows = prod(len(one) for one in each)
    return total.reshape(rows, -1).repeat(group, 1)
