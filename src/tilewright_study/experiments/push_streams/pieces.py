"""Key streams of stage T2 in the fewest affine pieces, and the configuration words that they need.

A tile that gathers keys reads those of its blocks one after another. A *piece* is a stretch of this stream that nested
loops give; each piece is one configuration of a controller. Part of a piece need not be one: of 0 1 2 10 11 12 two
loops give all six, and of its first four nothing does. Hence longest pieces first are not fewest pieces, and a
shortest path over the stream finds these.

A stretch of m rounds of B keys is affine where its first B keys are, and where differences repeat with period B. So all
pieces that begin at a key follow from where its differences stop to repeat.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tilewright.core.errors import TilewrightError
from tilewright.pushmem.fit import LEVELS, integers
from tilewright.pushmem.settings import CYCLE_BITS, generate


class _Blocks(Protocol):
    run_keys: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Keys ``start + sum(i_l * strides[l])``, loops innermost first."""

    start: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def words(self) -> int:
        """Configuration words of 16 bits.

        Two for where addresses and cycles start; for each loop an extent, a stride of addresses and one of cycles.
        """
        # ASSUME: loops that are not used, and the enable bit, are not sent.
        return 2 + 3 * len(self.extents)

    def keys(self) -> np.ndarray:
        """int64 [n]: the keys of the piece in order."""
        return generate(self.extents, self.strides, self.start)


def stream(blocks: _Blocks) -> np.ndarray:
    """int64 [n]: the keys that the blocks of a `tilewright.attention.blocks.Blocks` read, block after block, without
    padding."""
    keys = blocks.run_keys.ravel()
    return keys[keys >= 0].astype(np.int64)


def pieces(keys: np.ndarray, levels: int = LEVELS) -> list[Piece]:
    """The fewest pieces of at most `levels` loops that give the stream `keys`, int [n].

    Raises `TilewrightError` for another shape or for `levels` below 1.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    if keys.ndim != 1:
        raise TilewrightError(f"keys: expected a stream of one dimension, found the shape {keys.shape}")
    if levels < 1:
        raise TilewrightError(f"levels: expected at least 1, found {levels}")
    if not len(keys):
        return []
    lengths = _compiled()(np.diff(keys), levels, 1 << CYCLE_BITS)
    found, at = [], 0
    while at < len(keys):
        extents, strides = integers(keys[at : at + lengths[at], None], levels)  # type: ignore[misc]  # so many keys fit
        found.append(Piece(int(keys[at]), tuple(extents), tuple(stride for (stride,) in strides)))
        at += int(lengths[at])
    return found


def _compiled():
    """`_lengths`, compiled when it is first used."""
    global _FAST
    if _FAST is None:
        import numba

        _FAST = numba.njit(_lengths)
    return _FAST


_FAST: Callable | None = None


def _lengths(steps, levels, most):
    """int64 [n]: length of the piece that begins at each key in a shortest cut of the rest. steps: int64 [n-1]."""
    n = len(steps) + 1
    rest, chosen = np.zeros(n + 1, np.int64), np.ones(n, np.int64)
    # Fewest loops of the first `length` keys from here; `levels` + 1: none.
    loops = np.full(n + 1, levels + 1, np.int64)
    for i in range(n - 1, -1, -1):
        best, length, far = rest[i + 1] + 1, 1, 1
        loops[1] = 0
        # Lengths ascend, hence those of fewer rounds are known before they are asked for.
        run = 1
        while i + run < n and steps[i + run - 1] == steps[i]:
            run += 1
        size = 1
        while size <= far:
            # Within a run of equal steps, only whole ones repeat beyond its end.
            if loops[size] < levels and (size == 1 or size >= min(run, most)):
                same = i
                while same + size < n - 1 and steps[same] == steps[same + size]:
                    same += 1
                # All rounds but the first are `same - i` equal steps and one that leads to the first of them.
                rounds = 1 + (same - i + 1) // size
                if size + i >= n:
                    rounds = 1
                for m in range(2, min(rounds, most) + 1):
                    if m * size > n - i:
                        break
                    loops[m * size] = min(loops[m * size], loops[size] + 1)
                    far = max(far, m * size)
            if loops[size] <= levels and rest[i + size] + 1 <= best:
                best, length = rest[i + size] + 1, size
            size += 1
        rest[i], chosen[i] = best, length
        loops[1 : far + 1] = levels + 1
    return chosen
