"""Reverse Cuthill-McKee: a small bandwidth (stage T2).

Cuthill and McKee, "Reducing the bandwidth of sparse symmetric matrices", ACM National Conference 1969. SciPy's order is
this one up to ties: it sorts tokens by an unstable sort, whose result depends on the processor.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tilewright.attention.reorder._axes import key_order
from tilewright.core.errors import PatternError

if TYPE_CHECKING:
    from tilewright.graph import Graph


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings.

    collapse: order tokens whose rows and columns are both equal as one, which keeps windows whole; False runs on every
    token, as published.
    """

    symmetric: bool | None = None
    collapse: bool = True


def order(graph: "Graph", params: Params) -> tuple[np.ndarray, np.ndarray, dict[str, bool]]:
    """From a token with the fewest neighbours, all that are reached, those with fewer neighbours first, backwards (see
    `tilewright.attention.reorder`); tokens with equally many as they come.

    An unsymmetric pattern is ordered by the union with its transpose. Raises `PatternError` unless the pattern is
    square.
    """
    from tilewright.attention.reorder._breadth import reached

    if graph.n_rows != graph.n_cols:
        raise PatternError(f"order rcm: expected a square pattern, found {graph.n_rows} x {graph.n_cols}")
    token, pattern = _tokens(graph) if params.collapse else (np.arange(graph.n_rows), graph.to_csr())
    if (pattern != pattern.T).nnz:
        pattern = (pattern + pattern.T).tocsr()
    # A token that sees itself counts twice among its neighbours, as in SciPy.
    degree = np.diff(pattern.indptr) + (pattern.diagonal() != 0)
    place = reached(pattern.indptr, pattern.indices, degree, np.argsort(degree, kind="stable"))
    rank = np.empty(len(place), np.int64)
    rank[place[::-1]] = np.arange(len(place))
    rows = np.argsort(rank[token], kind="stable").astype(np.int32)
    cols, same = key_order(graph, rows, params.symmetric)
    return rows, cols, {"symmetric": same, "collapse": params.collapse}


def _tokens(graph):
    """Class int64 [N] of every token, by its row and its column, and the pattern among classes as a CSR array."""
    from scipy.sparse import csr_array

    from tilewright.attention.reorder._quotient import leaders, transpose

    col_class = leaders(*transpose(graph.indptr, graph.indices, graph.n_cols), np.ones(graph.n_cols, bool))
    _, first, token = np.unique(
        graph.row_id.astype(np.int64) * graph.n_cols + col_class, return_index=True, return_inverse=True
    )
    distinct = csr_array(
        (np.ones(len(graph.indices), bool), graph.indices, graph.indptr), shape=(graph.n_distinct, graph.n_cols)
    )
    return token, distinct[graph.row_id[first]][:, first].tocsr()
