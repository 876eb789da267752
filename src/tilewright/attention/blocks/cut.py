"""The best partition of consecutive rows into groups that share their keys (stage T2).

Given an order, cutting it into groups of at most M rows is a 1-D partition problem, which has an exact dynamic program
(Ahrens and Boman, arXiv 2005.12414). It needs the size of the union of the keys of every window of at most M rows. The
window of w + 1 rows that ends at row j holds the union of the w rows before j, and those keys of row j that none of
these w rows has. So it is enough to count the keys of each row by their age: the distance to the row that had them
last. Rows equal to their predecessor have keys of age 1 only and are not read, so that windowed patterns cost no more
than their distinct rows.

NumPy and SciPy alone where patterns are small: a compiler would take longer to load than they take to cut. Large ones
are cut by the functions of `_compiled`, where these are compiled already.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from tilewright.attention.blocks.tiles import SLICE_RUN
from tilewright.core import compiled
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
# Windows that are kept for another cut: 64 MB.
_KEPT = 1 << 24
# Groups are compared, padded to the longest, where that takes at most so many numbers for each row.
_PADDED = 4
# Entries from which on compiled functions are worth loading: 10^6 take NumPy 0.2 s, loading takes 0.4 to 0.8 s.
LARGE = 1 << 21
ENTERED = ("tilewright.attention.blocks._compiled",)


class Windows:
    """Units that the rows of each window of at most `most` consecutive rows touch together, for any cut of a graph.

    Counted when they are first asked for, and kept where they are at most `_KEPT`. width, gathered: of the units, see
    `unit_rows`.
    """

    def __init__(self, graph: Graph, width: int, gathered: bool, most: int) -> None:
        """Nothing is counted yet."""
        self.graph, self.width, self.gathered = graph, width, gathered
        self.most = min(most, graph.n_rows)
        self._kept: list[tuple[int, NDArray[np.int32]]] | None = None

    def stretches(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Yield, for stretches of rows, the first row and [rows, most]: the units of rows j-w..j at ``[j - first, w]``.

        Windows that begin before row 0 are counted as if they began there.
        """
        if self._kept is not None:
            yield from self._kept
            return
        graph, kept, keep = self.graph, [], self.graph.n_rows * self.most <= _KEPT
        arguments = *unit_rows(graph, self.width, self.gathered), graph.row_id, self.most
        fast = functions(graph)
        for begin, union in _compiled_unions(fast, *arguments) if fast else _window_unions(*arguments):
            if keep:
                kept.append((begin, union))
            yield begin, union
        self._kept = kept if keep else None

    @property
    def kept(self) -> bool:
        """Whether they are counted, and need not be again."""
        return self._kept is not None

    def sizes(self, ptr: ArrayLike) -> NDArray[np.int64]:
        """int64 [G]: units of each group of rows ``ptr[g]..ptr[g+1]``, of at most `most` rows each."""
        ptr, found = np.asarray(ptr, np.int64), np.zeros(len(np.asarray(ptr)) - 1, np.int64)
        last, height = ptr[1:] - 1, np.diff(ptr)
        for begin, union in self.stretches():
            groups = slice(*np.searchsorted(last, (begin, begin + len(union))))
            found[groups] = union[last[groups] - begin, height[groups] - 1]
        return found


def functions(graph: Graph) -> ModuleType | None:
    """The module `_compiled` where `graph` is large and it is compiled already, else None."""
    read = np.append(True, graph.row_id[1:] != graph.row_id[:-1])
    return compiled.load(*ENTERED) if graph.row_degree[read].sum() >= LARGE else None


def plain(array: ArrayLike, dtype: type) -> NDArray:
    """`array` as compiled functions take it: contiguous, writable and of `dtype`."""
    return np.require(array, dtype, ["C", "W"])


def regions(
    graph: Graph, region_rows: int = 128, windows: Windows | None = None, bounds: ArrayLike | None = None
) -> NDArray[np.int32]:
    """Row boundaries int32 [R+1] of the regions: the best cut into at most `region_rows` rows, keys gathered.

    bounds: as of `cut`.
    """
    return cut(graph, region_rows, SLICE_RUN, True, bounds, REGION_KEYS, windows)


def cut(
    graph: Graph,
    rows: int,
    width: int,
    gathered: bool,
    bounds: ArrayLike | None = None,
    overhead: int = GROUP_KEYS,
    windows: Windows | None = None,
) -> NDArray[np.int32]:
    """Row boundaries int32 [G+1] of the cheapest partition into consecutive groups of at most `rows` rows.

    A group costs ``(rows + GROUP_ROWS) * (keys + overhead)``, a group without keys nothing. With `gathered`, the
    keys are the union of those of its rows, padded to a multiple of `width`; else the aligned blocks of `width`
    keys that it touches. `bounds` (ascending row numbers from 0 to N_q) are boundaries that no group may cross.
    Of equal partitions, the one with the longest last groups. windows: of these units and as many rows, where several
    cuts of one graph share them. Raises `PatternError` for other `bounds` and `TileError` for `rows` below 1.
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
    step, unit_keys = (width, 1) if gathered else (1, width)
    most, fast = min(rows, n), functions(graph)
    # Cost of the best partition of the rows before j, and where its last group begins.
    best, back = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    for begin, union in (windows or Windows(graph, width, gathered, most)).stretches():
        if fast:
            fast.fill_best(union, begin, most, first, step, unit_keys, GROUP_ROWS, overhead, best, back)
            continue
        keys = -(-union[:, :most].astype(np.int64) // step) * (step * unit_keys)
        cost = np.where(keys > 0, (np.arange(1, most + 1) + GROUP_ROWS) * (keys + overhead), 0)
        # By the first row of the window: of equal costs, `argmin` finds the longest window.
        _fill_best(best, back, first, begin, np.ascontiguousarray(cost[:, ::-1]))
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
    first, kind = kinds(graph, ptr)
    few, ptr = taken(graph, ptr, first)
    indptr, units, n_units = unit_rows(few, width, gathered)
    if fast := functions(few):
        return fast.unions(*_plain_rows(indptr, units, few.row_id), n_units, plain(ptr, np.int64))[kind]
    seen = seen_units(indptr, units, few.row_id, n_units, ptr)
    return np.concatenate([np.diff(part.indptr) for _, _, part in seen]).astype(np.int64)[kind]


def kinds(graph: Graph, ptr: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``(first, kind)`` of the groups of rows ``ptr[g]..ptr[g+1]``: the first of each kind, ascending, and the kind of
    each group. Groups of a kind have the same distinct rows, one after the other. Where the longest group is far above
    the mean, each is one of its own."""
    ptr = np.asarray(ptr, np.int64)
    n, most = len(ptr) - 1, int(np.diff(ptr).max())
    if n * most > _PADDED * graph.n_rows:
        return np.arange(n), np.arange(n)
    rows = np.full((n, most), -1, np.int32)
    group = np.repeat(np.arange(len(rows)), np.diff(ptr))
    rows[group, np.arange(len(group)) - ptr[group]] = graph.row_id
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, kind = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[kind]


def taken(graph: Graph, ptr: ArrayLike, groups: NDArray[np.int64]) -> tuple[Graph, NDArray[np.int64]]:
    """``(graph, ptr)`` of some `groups` of rows ``ptr[g]..ptr[g+1]`` alone, one after the other, all keys there."""
    ptr = np.asarray(ptr, np.int64)
    height = np.diff(ptr)[groups]
    own = np.concatenate(([0], np.cumsum(height)))
    rows = np.arange(own[-1]) + np.repeat(ptr[groups] - own[:-1], height)
    return replace(graph, row_id=graph.row_id[rows]), own


def gathered(graph: Graph, ptr: ArrayLike, height: ArrayLike, windows: Windows | None = None) -> float:
    """Gathered work as a fraction of dense attention: sum over groups of rows ``ptr[g]..ptr[g+1]`` of
    ``height * |union of keys| / (N_q * N_k)``. height: rows of each group, padding included. windows: of keys, where
    they are counted already."""
    keys = windows.sizes(ptr) if windows else unions(graph, ptr, 1, True)
    # What an ArrayLike times an array is, type checkers cannot tell.
    return float((height * keys).sum() / (graph.n_rows * graph.n_cols))  # type: ignore


def best_gathered(graph: Graph, rows: int, multiple: int = 1) -> tuple[NDArray[np.int32], float]:
    """``(row_ptr, work)``: the best cut into groups of at most `rows` rows, keys gathered, and its `gathered` work.

    The rows of a group are padded to a `multiple`.
    """
    windows = Windows(graph, SLICE_RUN, True, rows)
    row_ptr = cut(graph, rows, SLICE_RUN, True, windows=windows)
    return row_ptr, gathered(graph, row_ptr, -(-np.diff(row_ptr) // multiple) * multiple, windows)


def unit_rows(graph: Graph, width: int, gathered: bool) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """``(indptr, units, n_units)``: what each distinct row touches, its keys or aligned blocks of `width` keys."""
    if gathered:
        return graph.indptr, graph.indices, graph.n_cols
    if width & (width - 1) == 0 and (fast := functions(graph)):
        indptr, indices, _ = _plain_rows(graph.indptr, graph.indices, graph.row_id)
        return *fast.blocks_of(indptr, indices, width.bit_length() - 1), -(-graph.n_cols // width)
    blocks = graph.indices // np.int32(width)
    new = np.ones(len(blocks), bool)
    new[1:] = blocks[1:] != blocks[:-1]
    new[graph.indptr[:-1][graph.indptr[:-1] < len(blocks)]] = True
    at = np.flatnonzero(new)
    return np.searchsorted(at, graph.indptr).astype(np.int64), blocks[at], -(-graph.n_cols // width)


def seen_units(
    indptr: np.ndarray, units: np.ndarray, row_id: np.ndarray, n_units: int, ptr: np.ndarray
) -> Iterator[tuple[int, int, csr_array]]:
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


def _plain_rows(indptr, units, row_id):
    return plain(indptr, np.int64), plain(units, np.int32), plain(row_id, np.int32)


def _compiled_unions(fast, indptr, units, n_units, row_id, most) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """As `_window_unions`, by the compiled functions `fast`."""
    arrays, n = _plain_rows(indptr, units, row_id), len(row_id)
    last, before = np.full(n_units, -most - 1, np.int64), np.zeros(most, np.int64)
    step = max(1, _CHUNK // most)
    for lo in range(0, n, step):
        union = np.empty((min(step, n - lo), most), np.int32)
        fast.count_windows(*arrays, lo, last, before, union)
        yield lo, union


def _window_unions(indptr, units, n_units, row_id, most) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """What `Windows.stretches` yields."""
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
        yield lo, np.ascontiguousarray(union.T, np.int32)


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
