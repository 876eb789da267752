"""What the ready patterns share: published patterns of sparse attention, by their sizes alone, without a network."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from tilewright.graph import from_distinct_rows

if TYPE_CHECKING:
    from tilewright.graph import Graph

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a pattern alone does not tell: the heads and the head dim that it is to be run with."""

    heads: Positive = 6
    head_dim: Positive = 64


def build(
    family: str,
    params: Any,
    rows: list[np.ndarray],
    row_id: np.ndarray,
    *,
    grid: tuple[int, ...] | None = None,
    hint: np.ndarray | None = None,
) -> "Graph":
    """The graph of a ready pattern.

    rows: the sorted keys of rows that queries share, int arrays; row_id: int [N], the row of each query; grid: the
    shape that tokens stand in, row by row, or None; hint: int [N], tokens that belong together.
    """
    meta = {
        "family": family,
        "paper_family": None,
        "variant": family,
        "heads": params.heads,
        "head_dim": params.head_dim,
        "grid": None if grid is None else list(grid),
        "bias": None,
    }
    return of_rows(rows, row_id, meta, hint)


def of_rows(rows: list[np.ndarray], row_id: np.ndarray, meta: dict[str, Any], hint: np.ndarray | None) -> "Graph":
    """The graph of as many keys as queries; rows, row_id, hint: see `build`."""
    indptr = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64)))
    indices, row_id = np.concatenate(rows, dtype=np.int32), np.asarray(row_id, np.int32)
    return from_distinct_rows(indptr, indices, row_id, len(row_id), meta=meta, row_hint=hint, col_hint=hint)


def with_globals(n: int, n_global: int, seen: Callable) -> tuple[list[np.ndarray], np.ndarray]:
    """``(rows, row_id)`` of `n` tokens whose first `n_global` see all and are seen by all; ``seen(token)`` are the
    sorted keys of the others."""
    everyone, first = np.arange(n), np.arange(n_global)
    others = (seen(token) for token in range(n_global, n))
    rows = [everyone] * (n_global > 0) + [np.concatenate((first, keys[keys >= n_global])) for keys in others]
    return rows, np.maximum(np.arange(n) - n_global + (n_global > 0), 0)


def band_size(n: int, window: int, n_global: int) -> int:
    """At most how many numbers a graph of `with_globals` holds where a token sees `window` others."""
    return n + n * (n_global > 0) + max(0, n - n_global) * (n_global + window)
