"""What the clustering orders work on: distinct rows over classes of equal columns (stage T2).

Both collapses are exact: equal rows keep their number as a size, equal columns as a weight. ViL in chunk mode shrinks
from 3,137 x 3,137 to 64 x 64 this way. Rows that see far more keys than most (global tokens) are ordered apart and
put last, so that they neither attract everything nor widen a group; columns that nearly every row sees do not
distinguish rows and are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from tilewright.attention.blocks.cut import unit_rows

if TYPE_CHECKING:
    from tilewright.graph import Graph

# Units seen by more than this share of the rows are in the union of nearly every group, whatever the order.
UBIQUITOUS = 0.9
# Most steps (sum over units of rows²) that a clustering may take, in all or for each row; above, units are sampled.
# 2e8 steps are some 0.3 s of one core. A 15x15 window with holes takes 41,000 a row; sampled to a third of that, its
# best cut gathers within 2 % of the same.
STEPS, STEPS_PER_ROW = 2e8, 1.2e4


@dataclass(frozen=True, eq=False)
class Quotient:
    """R distinct rows over U units (classes of equal columns, or of equal column blocks), with the transpose.

    rows: int64 [R], distinct rows of the graph. size: float64 [R], queries that share each. weight: float64 [U], keys
    in each unit. indptr, indices: the ascending units of each row. col_ptr, col_rows: the ascending rows of each
    unit. bare: int64, distinct rows that were asked for but have no unit left.
    """

    rows: np.ndarray
    size: np.ndarray
    weight: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    col_ptr: np.ndarray
    col_rows: np.ndarray
    bare: np.ndarray


def parts(graph: "Graph", col_block: int, wide: float) -> list[Quotient]:
    """Quotients of the ordinary rows, of those that see more than `wide` times the median number of keys, and of the
    rows without keys: what is ordered one after the other. Absent ones are left out."""
    return [quotient(graph, rows, col_block) for rows in split(graph, wide) if len(rows)]


def split(graph: "Graph", wide: float) -> list[np.ndarray]:
    """Distinct rows that queries have, int64 arrays: the ordinary ones, the wide ones, those without keys."""
    degree, present = np.diff(graph.indptr), np.bincount(graph.row_id, minlength=graph.n_distinct) > 0
    aside = degree > max(wide * np.median(graph.row_degree), 1)
    chosen = (~aside & (degree > 0), aside, degree == 0)
    return [np.flatnonzero(c & present) for c in chosen]


def join(graph: "Graph", orders: Iterable[tuple[Quotient, NDArray[np.int64]]]) -> NDArray[np.int32]:
    """Row order int32 [N_q] from ``(quotient, order of its rows)`` pairs; equal rows stay together, bare ones last."""
    class_order = np.concatenate([ids for q, order in orders for ids in (q.rows[order], q.bare)])
    rank = np.zeros(graph.n_distinct, np.int64)
    rank[class_order] = np.arange(len(class_order))
    return np.argsort(rank[graph.row_id], kind="stable").astype(np.int32)


def quotient(graph: "Graph", rows: np.ndarray, col_block: int = 1, exact: bool = False) -> Quotient:
    """The `Quotient` of some distinct `rows` of `graph`; columns in natural blocks of `col_block`.

    exact: no units are sampled, and those that all rows see are left out alone, not those that nearly all do.
    """
    indptr, units, n_units = unit_rows(graph, col_block, col_block == 1)
    indptr, units = take(indptr, units, rows)
    col_ptr, col_rows = transpose(indptr, units, n_units)
    count = np.diff(col_ptr)
    useful = (count > 0) & (count < len(rows) if exact else count <= max(1, UBIQUITOUS * len(rows)))
    leader = leaders(col_ptr, col_rows, useful)
    weight = np.bincount(leader[useful], minlength=n_units) * float(col_block)
    if not exact:
        budget = max(STEPS, STEPS_PER_ROW * len(rows))
        weight = _sample(weight, np.where(weight > 0, count, 0), budget)

    kept = np.flatnonzero(weight > 0)
    name = np.full(n_units, -1, np.int32)
    name[kept] = np.arange(len(kept))
    indptr, indices = rename(indptr, units, name)
    full = np.diff(indptr) > 0
    size = np.bincount(graph.row_id, minlength=graph.n_distinct)[rows].astype(np.float64)
    indptr = np.append(indptr[:-1][full], indptr[-1])
    return Quotient(  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
        rows[full], size[full], weight[kept], indptr, indices, *transpose(indptr, indices, len(kept)), rows[~full]
    )


def _sample(weight, count, budget):
    """Weights after sampling: 0 for units that are left out.

    A unit of `count` rows stays with probability ``min(1, limit/count)`` and its weight is divided by that, so that
    sizes of unions stay right on average while the units that cost most, and say least about locality, go first.
    """
    limit = count.max(initial=1)
    while (np.minimum(count, limit) * count.astype(np.float64)).sum() > budget:
        limit /= 2
    share = np.minimum(1, limit / np.maximum(count, 1))
    # ASSUME: a fixed seed; the order is a function of the graph alone.
    return np.where(np.random.default_rng(0).random(len(weight)) < share, weight / share, 0)


def take(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The CSR of some rows."""
    if len(rows) == len(indptr) - 1 and (np.diff(rows) == 1).all():
        return indptr, indices
    counts = np.diff(indptr)[rows]
    ptr = _bounds(counts)
    return ptr, indices[np.arange(ptr[-1]) + np.repeat(indptr[rows] - ptr[:-1], counts)]


def _bounds(counts):
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def transpose(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], n_cols: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The CSR of the transpose; rows ascend in each column."""
    entries = np.ones(len(indices), np.int8), indices, indptr
    found = csr_array(entries, shape=(len(indptr) - 1, n_cols)).tocsc()
    return found.indptr.astype(np.int64), found.indices.astype(np.int32, copy=False)


def leaders(col_ptr: NDArray[np.int64], col_rows: NDArray[np.int32], useful: NDArray[np.bool_]) -> NDArray[np.int64]:
    """First column equal to each useful one. A digest proposes, the comparison of all rows decides."""
    digests = np.random.default_rng(0).integers(1 << 63, size=int(col_rows.max(initial=0)) + 1, dtype=np.uint64)
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(digests[col_rows])))
    found, at = np.arange(len(useful)), np.flatnonzero(useful)
    _, first, same = np.unique((total[col_ptr[1:]] - total[col_ptr[:-1]])[at], return_index=True, return_inverse=True)
    other, counts = at[first[same]], np.diff(col_ptr)
    asked = (other != at) & (counts[other] == counts[at])
    at, other = at[asked], other[asked]
    ptr, rows = take(col_ptr, col_rows, at)
    wrong = np.append(0, np.cumsum(rows != take(col_ptr, col_rows, other)[1]))
    equal = wrong[ptr[1:]] == wrong[ptr[:-1]]
    found[at[equal]] = other[equal]
    return found


def rename(
    indptr: NDArray[np.int64], units: NDArray[np.int32], name: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The CSR with units renamed, those named -1 left out."""
    found = name[units]
    kept = found >= 0
    return (indptr, found) if kept.all() else (_bounds(kept)[indptr], found[kept])
