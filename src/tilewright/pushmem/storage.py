"""How many words of a buffer live at once, and addresses that need no more than these.

Word v lives from its write to its last read. A slot is read before it is written and is free from the next cycle on, so
that words v and w conflict where ``write(v) <= last(w)`` and ``write(w) <= last(v)``. Two layouts keep them apart:

- *linear*: the address modulo 1 + the largest difference of conflicting addresses;
- *dimensions*: each index modulo 1 + the largest difference in this dimension of conflicting words whose outer indices
  agree (successive moduli: Lefebvre and Feautrier, Parallel Computing 1998).

The smaller one is taken, the linear one where they tie. A tile's own addresses wrap, so that a linear layout that fits
the tile costs nothing, and is taken there.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

LINEAR, DIMENSIONS = "linear", "dimensions"


@dataclass(frozen=True)
class Layout:
    """kind: `LINEAR` or `DIMENSIONS`. moduli: one, or one for each dimension. pitch: steps of the linear address.
    live: words that live at once, at most; no layout is smaller."""

    kind: str
    moduli: tuple[int, ...]
    pitch: tuple[int, ...]
    live: int

    @property
    def size(self) -> int:
        """Words that the buffer takes."""
        return math.prod(self.moduli)

    def addresses(self, indices: list[np.ndarray] | np.ndarray) -> np.ndarray:
        """int64: the address of each index, an array for each dimension. Linear ones are left to the tile to wrap."""
        if self.kind == LINEAR:
            return _linear(indices, self.pitch)
        folded = [np.asarray(i, np.int64) % m for i, m in zip(indices, self.moduli, strict=True)]
        return _linear(folded, [math.prod(self.moduli[d + 1 :]) for d in range(len(self.moduli))])


def _linear(indices, pitch):
    return sum((np.asarray(i, np.int64) * k for i, k in zip(indices, pitch, strict=True)), np.int64(0))


def pitches(shape, fetch: int) -> tuple[int, ...]:
    """Steps of the linear address; rows are padded to whole wide words of `fetch`."""
    pitch = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        pitch[d] = pitch[d + 1] * (-(-shape[d + 1] // fetch) * fetch if d == len(shape) - 2 else shape[d + 1])
    return tuple(pitch)


def layout(
    shape: tuple[int, ...],
    indices: list[np.ndarray],
    write: np.ndarray,
    last: np.ndarray,
    fetch: int = 1,
    free: int = 0,
) -> Layout:
    """The smaller `Layout` of a buffer.

    indices: int64 [words] for each dimension; write, last: cycles, int64 [words], of those words alone that are read.
    Where `fetch` is more than 1, rows begin with a wide word. free: words up to which the linear layout is taken.
    """
    pitch = pitches(shape, fetch)
    linear = Layout(LINEAR, (modulus(_linear(indices, pitch), write, last),), pitch, live(write, last))
    if linear.size <= free:
        return linear
    moduli, group = [], np.zeros(len(write), np.int64)
    for d, index in enumerate(indices):
        order = np.argsort(group, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
        found = max((modulus(np.asarray(index)[p], write[p], last[p]) for p in parts), default=1)
        moduli.append(-(-found // fetch) * fetch if d == len(indices) - 1 else found)
        group = group * shape[d] + index
    other = Layout(DIMENSIONS, tuple(moduli), pitch, linear.live)
    return min(linear, other, key=lambda each: each.size)


def tiles(layout: Layout, span: int, capacity: int) -> int:
    """Tiles of `capacity` words that hold a layout; 1 where it fits one.

    span: 1 + the largest address before it wraps. A chain of tiles wraps behind a power of two of them. Where addresses
    need not wrap, each tile counts.
    """
    needed = -(-layout.size // capacity)
    if needed <= 1 or layout.kind == DIMENSIONS:
        return max(1, needed)
    return min(1 << (needed - 1).bit_length(), -(-span // capacity))


def modulus(addresses: np.ndarray, write: np.ndarray, last: np.ndarray) -> int:
    """1 + the largest difference of addresses of two words that conflict; 1 where none do."""
    order = np.argsort(write, kind="stable")
    low: list[tuple[int, int]] = []
    high: list[tuple[int, int]] = []
    most = 0
    for begin, end, address in zip(write[order].tolist(), last[order].tolist(), addresses[order].tolist(), strict=True):
        if end < begin:
            continue
        heapq.heappush(low, (address, end))
        heapq.heappush(high, (-address, end))
        for heap in (low, high):
            # Words that died before this one was written; others leave when they come to the top.
            while heap[0][1] < begin:
                heapq.heappop(heap)
        most = max(most, -high[0][0] - low[0][0])
    return most + 1


def live(write: np.ndarray, last: np.ndarray) -> int:
    """Words that live in one cycle, at most."""
    lasting = last >= write
    if not lasting.any():
        return 0
    change = np.zeros(int(last.max()) + 2 - int(write.min()), np.int64)
    np.add.at(change, write[lasting] - write.min(), 1)
    np.add.at(change, last[lasting] + 1 - write.min(), -1)
    return int(np.cumsum(change).max())
