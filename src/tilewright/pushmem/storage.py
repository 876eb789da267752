"""How many words of a buffer live at once, and addresses that need no more places than these.

Word v lives from its write to its last read. A slot is read before it is written and is free from the next cycle on, so
that words v and w conflict where ``write(v) <= last(w)`` and ``write(w) <= last(v)``. Addresses modulo 1 + the largest
difference of conflicting ones keep them apart. A tile's own addresses wrap, so that such a layout costs nothing.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """size: places that the buffer takes, the modulus of its addresses. live: words that live at once, at most; no
    layout is smaller."""

    size: int
    live: int


def pitches(shape: Sequence[int], fetch: int) -> tuple[int, ...]:
    """Steps of the linear address; rows are padded to whole wide words of `fetch`."""
    pitch = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        pitch[d] = pitch[d + 1] * (-(-shape[d + 1] // fetch) * fetch if d == len(shape) - 2 else shape[d + 1])
    return tuple(pitch)


def layout(addresses: np.ndarray, write: np.ndarray, last: np.ndarray) -> Layout:
    """The `Layout` of a buffer. addresses, write, last: of the words that are read, int64 [words]."""
    return Layout(modulus(addresses, write, last), live(write, last))


def tiles(size: int, span: int, capacity: int) -> int:
    """Tiles of `capacity` words that hold `size` places; 1 where they fit one.

    span: 1 + the largest address before it wraps. A chain of tiles wraps behind a power of two of them. Where addresses
    need not wrap, each tile counts.
    """
    needed = max(1, -(-size // capacity))
    return min(1 << (needed - 1).bit_length(), -(-span // capacity)) if needed > 1 else 1


def modulus(addresses: np.ndarray, write: np.ndarray, last: np.ndarray) -> int:
    """1 + the largest difference of addresses of two words that conflict; 1 where none do."""
    if len(write) and write.max() <= last.min():
        # All live at once, as where an image is turned.
        return int(addresses.max() - addresses.min()) + 1
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
