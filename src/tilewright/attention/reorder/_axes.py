"""The order of the keys that goes with an order of the queries (stage T2)."""

from typing import TYPE_CHECKING

import numpy as np

from tilewright.core.errors import PatternError

if TYPE_CHECKING:
    from tilewright.graph import Graph

# ASSUME: a row that sees more than this multiple of the median number of keys (a global token) says little about
# locality.
WIDE = 2.0
# Most axes of a grid.
AXES = 3


def key_order(graph: "Graph", row_order: np.ndarray, symmetric: bool | None) -> tuple[np.ndarray, bool]:
    """``(col_order int32 [N_k], symmetric)`` for `row_order` under the setting `symmetric` (see
    `tilewright.attention.reorder`).

    True: keys follow the queries. False: keys keep their place; they are gathered. None: True for a square pattern;
    for a rectangular one the keys come in the order in which ordinary queries first see them, which brings the keys
    of a group together for tiles of contiguous keys. Raises `PatternError` when a symmetric order is asked of a
    rectangular pattern.
    """
    n_rows, n_cols = graph.shape
    if symmetric and n_rows != n_cols:
        raise PatternError(
            f"symmetric: expected a square pattern, found {n_rows} x {n_cols}; set it to false, or leave it out"
        )
    if symmetric or (symmetric is None and n_rows == n_cols):
        return row_order, True
    if symmetric is None:
        return _first_seen(graph, row_order), False
    return np.arange(n_cols, dtype=np.int32), False


def _first_seen(graph, row_order):
    degree = np.diff(graph.indptr)
    place = np.full(graph.n_distinct, graph.n_rows)
    np.minimum.at(place, graph.row_id[row_order], np.arange(graph.n_rows))
    place[degree > WIDE * np.median(graph.row_degree)] = graph.n_rows
    first = np.full(graph.n_cols, graph.n_rows)
    np.minimum.at(first, graph.indices, np.repeat(place, degree))
    return np.argsort(first, kind="stable").astype(np.int32)
