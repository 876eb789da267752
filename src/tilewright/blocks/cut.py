"""The best partition of consecutive rows into groups that share their keys (stage T2).

Given an order, cutting it into groups of at most M rows is a 1-D partition problem, which has an exact dynamic program
(Ahrens and Boman, arXiv 2005.12414). It needs the size of the union of the keys of every window of at most M rows. The
window of w + 1 rows that ends at row j holds the union of the w rows before j, and those keys of row j that none of
these w rows has. So it is enough to count the keys of each row by their age: the distance to the row that had them
last. Rows equal to their predecessor have keys of age 1 only and are not read, so that windowed patterns cost no more
than their distinct rows.

NumPy and SciPy alone: a compiler would take longer to load than most patterns take to cut.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from tilewright.blocks.tiles import SLICE_RUN
from tilewright.core.errors import PatternError, TileError
from tilewright.graph import Graph, take_rows

# ASSUME: a group costs as much as this many more rows, for its keys are fetched however few its rows are. A least
# squares fit of batched SDPA with gathered keys on two CPU cores (3 heads of 32, float32) gives 87; a GPU tile of 64
# rows costs the same whatever it holds. Rows padded to a multiple of 16 instead were tried: the padding fills with rows
# of the neighbours, which tears windows of 49 rows into groups of 16, 32 and 48 and executes a tenth more.
GROUP_ROWS = 64
# ASSUME: a group costs as much as this many more keys: its queries are read and its result is written.
GROUP_KEYS = 16
# ASSUME: regions are cut as if a group cost more, hence coarser; each tile cuts them further by its cost.
REGION_KEYS = 128

# Windows and entries that are counted at a time, which bounds the memory that this takes: some 100 MB.
_CHUNK = 1 << 21


def regions(graph: Graph, region_rows: int = 128) -> NDArray[np.int32]:
    """Row boundaries int32 [R+1] of the regions: the best cut into at most `region_rows` rows, keys gathered."""
    return cut(graph, region_rows, SLICE_RUN, True, overhead=REGION_KEYS)


def cut(
    graph: Graph,
    rows: int,
    width: int,
    gathered: bool,
    bounds: ArrayLike | None = None,
    overhead: int = GROUP_KEYS,
) -> NDArray[np.int32]:
    """Row boundaries int32 [G+1] of the cheapest partition into consecutive groups of at most `rows` rows.

    A group costs ``(rows + GROUP_ROWS) * (keys + overhead)``, a group without keys nothing. With `gathered`, the
    keys are the union of those of its rows, padded to a multiple of `width`; else the aligned blocks of `width`
    keys that it touches. `bounds` (ascending row numbers from 0 to N_q) are boundaries that no group may cross.
    Of equal partitions, the one with the longest last groups. Raises `PatternError` for other `bounds` and
    `TileError` for `rows` below 1.
    """
    if rows < 1:
        raise TileError(f"rows of a group: expected at least 1, found {rows}")
    n = graph.n_rows
    first = np.zeros(n, np.int64)
    if bounds is not None:
        bounds = np.asarray(bounds, np.int64)
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != n or (np.diff(bounds) <= 0).any():
            raise PatternError(f"bounds: expected ascending row numbers from 0 to {n}, found {bounds}")
        first = np.repeat(bounds[:-1], np.diff(bounds))
    indptr, units, n_units = unit_rows(graph, width, gathered)
    unit_keys, step = (1, width) if gathered else (width, 1)
    most = min(rows, n)
    height = np.arange(1, most + 1)[:, None] + GROUP_ROWS
    # Cost of the best partition of the rows before j, and where its last group begins.
    best, back = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    for begin, union in _window_unions(indptr, units, graph.row_id, n_units, most):
        keys = -(-union // step) * (step * unit_keys)
        cost = np.where(keys > 0, height * (keys + overhead), 0)
        # By the first row of the window: of equal costs, `argmin` finds the longest window.
        _fill_best(best, back, first, begin, np.ascontiguousarray(cost[::-1].T))
    ptr = [n]
    while ptr[-1]:
        ptr.append(int(back[ptr[-1]]))
    return np.array(ptr[::-1], np.int32)


def _fill_best(best, back, first, begin, cost):
    """Fill `best` and `back` [N_q+1] from row `begin` on. cost: [rows, most], of the windows ending at each row, the
    longest first; first: int64 [N_q], the row that the group of each row may begin with at the earliest."""
    most = cost.shape[1]
    earliest = np.maximum(np.arange(begin, begin + len(cost)) - most + 1, first[begin : begin + len(cost)])
    for j, lo in enumerate(earliest.tolist(), begin):
        total = best[lo : j + 1] + cost[j - begin, lo - j - 1 :]
        chosen = total.argmin()
        best[j + 1], back[j + 1] = total[chosen], lo + chosen


def unions(graph: Graph, ptr: ArrayLike, width: int, gathered: bool) -> NDArray[np.int64]:
    """int64 [G]: keys that each group of rows ``ptr[g]..ptr[g+1]`` sees, or aligned blocks of `width` keys."""
    indptr, units, n_units = unit_rows(graph, width, gathered)
    seen = seen_units(indptr, units, graph.row_id, n_units, ptr)
    return np.concatenate([np.diff(part.indptr) for _, _, part in seen]).astype(np.int64)


def gathered(graph: Graph, ptr: ArrayLike, height: ArrayLike) -> float:
    """Gathered work as a fraction of dense attention: sum over groups of rows ``ptr[g]..ptr[g+1]`` of
    ``height * |union of keys| / (N_q * N_k)``. height: rows of each group, padding included."""
    # What an ArrayLike times an array is, type checkers cannot tell.
    return float((height * unions(graph, ptr, 1, True)).sum() / (graph.n_rows * graph.n_cols))  # type: ignore


def unit_rows(graph: Graph, width: int, gathered: bool) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """``(indptr, units, n_units)``: what each distinct row touches, its keys or aligned blocks of `width` keys."""
    if gathered:
        return graph.indptr, graph.indices, graph.n_cols
    blocks = graph.indices // np.int32(width)
    new = np.ones(len(blocks), bool)
    new[1:] = blocks[1:] != blocks[:-1]
    new[graph.indptr[:-1][graph.indptr[:-1] < len(blocks)]] = True
    indptr = np.concatenate(([0], np.cumsum(new)))[graph.indptr]
    return indptr, blocks[new], -(-graph.n_cols // width)


def seen_units(indptr, units, row_id, n_units, ptr) -> Iterator[tuple[int, int, csr_array]]:
    """Yield, for stretches of groups, ``(lo, hi, seen)``: csr int32 [hi-lo, n_units], how often the rows
    ``ptr[g]..ptr[g+1]`` of each group have each unit, the units of a group ascending.

    indptr, units: those of each distinct row, repeated units counting as often; row_id: int [N_q].
    """
    ptr, degree = np.asarray(ptr), np.diff(indptr)[row_id]
    pattern = csr_array((np.ones(len(units), np.int32), units, indptr), shape=(len(indptr) - 1, n_units))
    changes = np.append(True, row_id[1:] != row_id[:-1])
    changes[ptr[:-1]] = True
    for lo, hi in _stretches(np.add.reduceat(degree * changes, ptr[:-1])):
        group, shape = ptr[lo : hi + 1], (hi - lo, len(indptr) - 1)
        rows = row_id[group[0] : group[-1]]
        # A copy, for duplicates are summed in place.
        members = csr_array((np.ones(len(rows), np.int32), rows, group - group[0]), shape=shape, copy=True)
        members.sum_duplicates()
        seen = members @ pattern
        seen.sort_indices()
        yield lo, hi, seen


def _window_unions(indptr, units, row_id, n_units, most) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield, for stretches of rows, the first row and [most, rows]: the units of the rows j-w..j at ``[w, j - first]``.

    Windows that begin before row 0 are counted as if they began there.
    """
    n = len(row_id)
    # Rows equal to their predecessor form a sequence, of which the first row is read.
    start = np.concatenate(([0], np.flatnonzero(np.diff(row_id)) + 1))
    end = np.append(start[1:], n) - 1
    degree = np.diff(indptr)[row_id]
    # Last row that had each unit.
    last = np.full(n_units, -most - 1, np.int64)
    before = np.zeros(most, np.int64)
    work = np.full(n, most)
    work[start] += degree[start]
    for lo, hi in _stretches(work):
        span = slice(*np.searchsorted(start, (lo, hi)))
        ages = _ages(indptr, units, row_id[start[span]], start[span], end[span], last, most)
        counts = np.bincount(ages[0] * (hi - lo) + ages[1] - lo, minlength=(most + 1) * (hi - lo))
        counts = counts.reshape(most + 1, hi - lo)
        repeated = np.ones(hi - lo, bool)
        repeated[start[span] - lo] = False
        counts[1, repeated] = degree[lo:hi][repeated]
        # Units of each row that none of the w rows before it has; then, in place, the unions.
        union = (degree[lo:hi] - np.cumsum(counts, axis=0))[:most]
        for w in range(1, most):
            union[w, 1:] += union[w - 1, :-1]
            union[w, 0] += before[w - 1]
        before = union[:, -1].copy()
        yield lo, union


def _stretches(work):
    """Ranges ``(lo, hi)`` of consecutive numbers whose `work` [n] is about `_CHUNK` together."""
    chunk = (np.cumsum(work) - work) // _CHUNK
    ptr = np.concatenate(([0], np.flatnonzero(np.diff(chunk)) + 1, [len(work)])).tolist()
    return itertools.pairwise(ptr)


def _ages(indptr, units, distinct, start, end, last, most):
    """``(age, row)`` of each unit of the sequences of rows start..end: rows since it was seen, at most `most`, and the
    sequence's first row. distinct: the distinct row of each sequence. Updates `last` [n_units]."""
    ptr, found = take_rows(indptr, units, distinct)
    pattern = csr_array((np.ones(len(found), bool), found, ptr), shape=(len(distinct), len(last))).tocsc()
    row, previous = start[pattern.indices], np.empty(len(found), np.int64)
    previous[1:] = end[pattern.indices[:-1]]
    present = np.flatnonzero(np.diff(pattern.indptr))
    previous[pattern.indptr[present]] = last[present]
    last[present] = end[pattern.indices[pattern.indptr[present + 1] - 1]]
    return np.minimum(row - previous, most), row
