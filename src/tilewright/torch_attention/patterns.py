"""Patterns as block-sparse peers take them: kinds of blocks, bits of rows, and rules that need no bits."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tilewright.core.errors import Unavailable

if TYPE_CHECKING:
    from tilewright.graph import Graph


def kinds(graph: "Graph", rows: np.ndarray, keys: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """bool [Q, K] twice: blocks that hold some pair but not all, and full ones. Blocks over the edge are never full.

    rows, keys: of a block, `keys` by default as many as `rows`.
    """
    keys = keys or rows
    n_k = -(-graph.n_cols // keys)
    place = graph.entry_row_id * n_k + graph.indices // keys
    of_class = np.bincount(place, minlength=graph.n_distinct * n_k).reshape(-1, n_k)
    entries = np.stack([of_class[graph.row_id[lo : lo + rows]].sum(0) for lo in range(0, graph.n_rows, rows)])
    full = entries == rows * keys
    return (entries > 0) & ~full, full


def listed(kind: Any, device: torch.device | str) -> list:
    """For a bool [Q, K]: int32 [1, 1, Q] counts and [1, 1, Q, K] block numbers, those that count first."""
    first = np.argsort(~kind, axis=1, kind="stable").astype(np.int32)
    return [torch.from_numpy(table)[None, None].to(device) for table in (kind.sum(1, dtype=np.int32), first)]


def bits(graph: "Graph", max_bytes: int) -> np.ndarray:
    """uint8 [C, ceil(N_k / 8)]: the distinct rows, lowest bit first. Raises `Unavailable` above `max_bytes`."""
    size = graph.n_distinct * -(-graph.n_cols // 8)
    if size > max_bytes:
        raise Unavailable(f"the pattern's bits take {size:,} bytes; at most {max_bytes:,} are allowed")
    table = np.zeros((graph.n_distinct, -(-graph.n_cols // 8)), np.uint8)
    np.bitwise_or.at(table, (graph.entry_row_id, graph.indices >> 3), (1 << (graph.indices & 7)).astype(np.uint8))
    return table


def rule(graph: "Graph") -> Any:
    """``(places of queries, places of keys, reach)`` that tell the pattern by arithmetic, or None.

    A pair is allowed where both coordinates of its places differ by at most `reach`, and where a place is negative.
    places: int32 [N_q] and [N_k], 2^15 times one coordinate plus the other. Known are windows and chunks of a Vision
    Longformer, disjoint windows, and kept tokens.
    """
    if (owner := windows(graph)) is not None:
        return graph.row_id, owner.astype(np.int32), 0
    if (common := kept(graph)) is not None:
        own = np.arange(graph.n_rows, dtype=np.int32)
        return own, np.where(np.isin(own, common), -1, own).astype(np.int32), 0
    meta = graph.meta
    if meta.get("family") != "vision_longformer" or meta["mode"] not in ("exact", "chunk"):
        return None
    side, n_global, radius = meta["grid"][0], meta["n_global"], meta["window"] // 2
    step, reach = (1, radius) if meta["mode"] == "exact" else (radius, 1)
    y, x = np.divmod(np.arange(side * side), side)
    natural = np.concatenate((np.full(n_global, -1), (y // step << 15) + x // step)).astype(np.int32)
    orders = (graph.row_order, graph.col_order)
    return *(natural if order is None else natural[order] for order in orders), reach


def windows(graph: "Graph") -> np.ndarray | None:
    """int [N_k], the distinct row that sees each key, of a pattern of disjoint windows of equal size; else None."""
    degree, queries = np.diff(graph.indptr), np.bincount(graph.row_id, minlength=graph.n_distinct)
    whole = len(graph.indices) == graph.n_cols and (np.bincount(graph.indices, minlength=graph.n_cols) == 1).all()
    if graph.n_distinct < 2 or not whole or len(set(degree)) > 1 or len(set(queries)) > 1:
        return None
    owner = np.empty(graph.n_cols, np.int64)
    owner[graph.indices] = graph.entry_row_id
    return owner


def kept(graph: "Graph") -> np.ndarray | None:
    """int, ascending: the keys that all queries see, where each other query sees itself beside these; else None."""
    degree = np.diff(graph.indptr)
    common = np.bincount(graph.indices, minlength=graph.n_cols) == graph.n_distinct
    more = degree - common.sum()
    if graph.n_rows != graph.n_cols or common.all() or not np.array_equal(more[graph.row_id], ~common):
        return None
    # Each other query has a row of its own, with one key more: itself.
    query = np.empty(graph.n_distinct, np.int64)
    query[graph.row_id] = np.arange(graph.n_rows)
    own = graph.indices[~common[graph.indices]]
    if not common.any() or len(own) < (~common).sum() or not np.array_equal(query[more > 0], own):
        return None
    return np.flatnonzero(common)
