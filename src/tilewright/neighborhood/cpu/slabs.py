"""Slabs, the jobs of a CPU's workers in the forward: neighbouring boxes of some heads of one image.

The keys and values of a slab are copied once, in float32, one token after the other: its boxes share most of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from threading import local

import numpy as np
import torch
from torch import Tensor

from tilewright.neighborhood.cpu import kernel
from tilewright.neighborhood.rule import Axis, Rule

# Keys and values that a worker copies at a time, unless twice those of a box are more.
_BYTES = 8 << 20
# Slabs for each worker, unless they are shorter than a quarter of a millisecond.
_PARTS, _SHORTEST_NS = 4, 250e3


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
            held = self._held[name] = torch.empty(size, dtype=torch.float32, device="cpu")
        return held[:size].view(shape)

    def copy(self, name: str, x: Tensor, width: int) -> Tensor:
        """A contiguous copy of `x` with so many values in each row, zeros after its own."""
        made = self.take(name, *x.shape[:-1], width)
        made[..., : x.shape[-1]] = x
        made[..., x.shape[-1] :] = 0
        return made

    def token(self, name: str, x: Tensor) -> Tensor:
        """A contiguous copy [H, *grid] of `x` [*grid, H]."""
        made = self.take(name, x.shape[-1], *x.shape[:-1])
        return made.copy_(x.movedim(-1, 0))


def inside(rule: Rule) -> Iterator[tuple]:
    """Where each grid of sub-axes lies in tensors [B, *grid, ...]."""
    for first in product(*map(range, rule.dilation)):
        yield slice(None), *(slice(x, None, d) for x, d in zip(first, rule.dilation, strict=True))


@dataclass(frozen=True)
class Table:
    """Boxes of `size` queries along an axis of `n` tokens, whose keys are `keys`, at most `most` of a box.

    data: int64 [boxes, ...]: where the keys of a box begin, how many there are, and a bit for each lane of `kernel`
        that is no copy of another one; then of all lanes the query, the first key that it sees, counted from the first
        of the box, and how many it sees. Lanes without a query of their own are copies.
    """

    data: np.ndarray
    n: int
    size: int
    keys: int
    most: int

    def __len__(self) -> int:
        """Boxes."""
        return len(self.data)

    def places(self, first: int, end: int) -> tuple[slice, slice]:
        """Queries and keys of boxes ``[first, end)``."""
        last = self.data[end - 1]
        return slice(first * self.size, min(end * self.size, self.n)), slice(
            int(self.data[first, 0]), int(last[0] + last[1])
        )


@lru_cache(16)
def _table(axis, n, size, inner, of_keys):
    """The `Table` of an axis of `n` tokens; so many neighbouring lanes have one place on it."""
    lane = np.arange(kernel.lanes())
    own = np.arange(0, n, size)[:, None] + lane // inner % size
    places = np.minimum(own, n - 1)
    lo, hi = (np.broadcast_to(x, places.shape) for x in (axis.queries if of_keys else axis.keys)(places, n))
    begin, hi = lo.min(1, keepdims=True), np.maximum(lo, hi)
    end = hi.max(1, keepdims=True)
    bits = ((own < n) << lane).sum(1, keepdims=True)
    data = np.concatenate([begin, end - begin, bits, places, lo - begin, hi - lo], 1).astype(np.int64)
    return Table(data, n, size, int((end - begin).sum()), int((end - begin).max()))


def tables(
    axes: Iterable[Axis], grid: Iterable[int], box: tuple[int, ...], group: int, of_keys: bool = False
) -> tuple[Table, ...]:
    """The `Table` of each axis, for boxes of so many queries of `group` heads, which are neighbours in lanes.

    of_keys: of boxes of keys and the queries that see them instead.
    """
    inner = (group * prod(box[i + 1 :]) for i in range(len(box)))
    return tuple(_table(*one, of_keys) for one in zip(axes, grid, box, inner, strict=True))


def slabs(
    batch: int, units: int, each: tuple[Table, ...], token_bytes: int, score_ns: float, threads: int
) -> Iterator[tuple[int, ...]]:
    """``(image, (first, end) of units, and of boxes along each axis)`` for each slab: as many as keep all workers busy,
    of keys that a worker copies at a time.

    units: groups of heads that share a box. token_bytes: of a key and its value. score_ns: time of a key in a box.
    """
    counts = [units, *map(len, each)]
    parts = [1] * len(counts)
    budget = max(_BYTES, 2 * prod(one.most for one in each) * token_bytes)
    ns = batch * units * prod(one.keys for one in each) * score_ns
    wanted = max(threads, min(_PARTS * threads, ns / _SHORTEST_NS)) / batch

    def part(i):
        """Units, or queries and keys, of a part, at most."""
        many = -(-counts[i] // parts[i])
        if not i:
            return many, many
        one = each[i - 1]
        return many * one.size, min((many - 1) * one.size + one.most, one.n)

    while parts != counts and (
        prod(part(i)[1] for i in range(len(parts))) * token_bytes > budget or prod(parts) < wanted
    ):
        # Where the fewest keys are copied twice.
        i = max(range(len(parts)), key=lambda i: (parts[i] < counts[i]) * part(i)[0] / part(i)[1])
        parts[i] = min(2 * parts[i], counts[i])
    ends = [[count * i // many for i in range(many + 1)] for count, many in zip(counts, parts, strict=True)]
    return product(range(batch), *(pairwise(one) for one in ends))
