"""Tiles: how many queries a block holds and how its keys are brought (stages T2 to T5)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.core.errors import TileError

# Keys that an Mx1 slice packs into one run: the k-step of 16-bit tensor-core products.
SLICE_RUN = 16
# Rows of one tensor-core product: no tile of a GPU is smaller, however few the queries.
SMALL_ROWS = 16


@dataclass(frozen=True, order=True)
class Tile:
    """A tile of `rows` queries. `keys` of 1: keys gathered one by one; above: aligned blocks of that many keys."""

    rows: int
    keys: int

    @property
    def name(self) -> str:
        """The tile as written in configuration and file names, e.g. ``64x1``."""
        return f"{self.rows}x{self.keys}"

    @property
    def gathered(self) -> bool:
        """True for an Mx1 slice, whose keys are packed one by one."""
        return self.keys == 1

    @property
    def run(self) -> int:
        """Keys in one run: the block width, or the packing width of a slice."""
        return SLICE_RUN if self.gathered else self.keys


def parse(name: str) -> Tile:
    """Read ``"MxN"``: powers of two, 1 ≤ M ≤ 128, N = 1 or 8 ≤ N ≤ 128. Raises `TileError`."""
    match = re.fullmatch(r"([1-9][0-9]{,8})x([1-9][0-9]{,8})", str(name))
    if not match:
        raise TileError(f"tile {name!r}: expected MxN such as 64x64 or 64x1")
    rows, keys = map(int, match.groups())
    if rows & (rows - 1) or not 1 <= rows <= 128:
        raise TileError(f"tile {name!r}: rows must be a power of two from 1 to 128, found {rows}")
    if keys & (keys - 1) or not (keys == 1 or 8 <= keys <= 128):
        raise TileError(f"tile {name!r}: keys must be 1 or a power of two from 8 to 128, found {keys}")
    return Tile(rows, keys)


def check_fits(tile: Tile, shape: tuple[int, int]) -> None:
    """Raise `TileError` when half of `tile` would hold all queries, or all keys, of a graph of `shape` ``(N_q, N_k)``.

    Padding within one tile is usual (64 rows for 50 queries). A tile of twice the size needed is a mistake, unless it
    has at most `SMALL_ROWS` rows.
    """
    for what, size, count, small in (("queries", tile.rows, shape[0], SMALL_ROWS), ("keys", tile.keys, shape[1], 1)):
        most = max(small, 1 << (count - 1).bit_length())
        if size > most:
            raise TileError(
                f"tile {tile.name} is larger than the graph: expected at most {most} {what} for {count}, found {size}"
            )


def fitting(names: Iterable[str], shape: tuple[int, int], fewest_rows: int) -> tuple[str, ...]:
    """The tiles of `names` that fit a graph of `shape` ``(N_q, N_k)``.

    Where none fits: the smallest slice that holds all queries and has at least `fewest_rows` rows.
    """
    found = tuple(name for name in names if _fits(parse(name), shape))
    return found or (Tile(max(fewest_rows, 1 << (shape[0] - 1).bit_length()), 1).name,)


def _fits(tile, shape):
    try:
        check_fits(tile, shape)
    except TileError:
        return False
    return True


def aligned_keys(first: NDArray[np.int32], width: int, n_keys: int) -> NDArray[np.int32]:
    """int32 [U, width]: the keys of block-tile runs that begin with `first` [U, 1], -1 from `n_keys` on."""
    keys: NDArray = first + np.arange(width, dtype=np.int32)
    keys[keys >= n_keys] = -1
    return keys
