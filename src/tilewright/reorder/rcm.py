"""Reverse Cuthill-McKee, from SciPy: the smallest bandwidth (stage T2)."""

import msgspec
import numpy as np

from tilewright.core.errors import PatternError
from tilewright.reorder._axes import key_order


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings.

    collapse: order tokens whose rows and columns are both equal as one, which keeps windows whole; False runs on every
    token, as published.
    """

    symmetric: bool | None = None
    collapse: bool = True


def order(graph, params):
    """The order of `scipy.sparse.csgraph.reverse_cuthill_mckee` (see `tilewright.reorder`).

    An unsymmetric pattern is ordered by the union with its transpose. Raises `PatternError` unless the pattern is
    square.
    """
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    if graph.n_rows != graph.n_cols:
        raise PatternError(f"order rcm: expected a square pattern, found {graph.n_rows} x {graph.n_cols}")
    token, pattern = _tokens(graph) if params.collapse else (np.arange(graph.n_rows), graph.to_csr())
    symmetric = (pattern != pattern.T).nnz == 0
    rank = np.empty(pattern.shape[0], np.int64)
    rank[reverse_cuthill_mckee(pattern, symmetric_mode=symmetric)] = np.arange(len(rank))
    rows = np.argsort(rank[token], kind="stable").astype(np.int32)
    cols, same = key_order(graph, rows, params.symmetric)
    return rows, cols, {"symmetric": same, "collapse": params.collapse}


def _tokens(graph):
    """Class int64 [N] of every token, by its row and its column, and the pattern among classes as a CSR array."""
    from scipy.sparse import csr_array

    from tilewright.reorder._quotient import leaders, transpose

    col_class = leaders(*transpose(graph.indptr, graph.indices, graph.n_cols), np.ones(graph.n_cols, bool))
    _, first, token = np.unique(
        graph.row_id.astype(np.int64) * graph.n_cols + col_class, return_index=True, return_inverse=True
    )
    distinct = csr_array(
        (np.ones(len(graph.indices), bool), graph.indices, graph.indptr), shape=(graph.n_distinct, graph.n_cols)
    )
    return token, distinct[graph.row_id[first]][:, first].tocsr()
