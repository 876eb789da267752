"""The best partition of consecutive rows into groups that share their keys (stage T2).

Given an order, cutting it into groups of at most M rows is a 1-D partition problem, which has an exact
dynamic program (Ahrens and Boman, arXiv 2005.12414). What it needs is the size of the union of the keys of
every window of at most M rows: a key of row j that was last seen at row p enters the union of exactly the
windows that start after p and end at j, so that one pass over the entries gives all of them in
O(entries + N·M). Rows equal to their predecessor bring nothing new and are not read at all, so that windowed
patterns cost no more than their distinct rows.
"""

import numpy as np
from numba import njit

from tilewright.blocks.tiles import SLICE_RUN
from tilewright.core.errors import PatternError, TileError

# ASSUME: a group costs as much as this many more rows, for its keys are fetched however few its rows are. A least
# squares fit of batched SDPA with gathered keys on two CPU cores (3 heads of 32, float32) gives 87; a GPU tile of 64
# rows costs the same whatever it holds. Rows padded to a multiple of 16 instead were tried: the padding fills with rows
# of the neighbours, which tears windows of 49 rows into groups of 16, 32 and 48 and executes a tenth more.
GROUP_ROWS = 64
# ASSUME: a group costs as much as this many more keys: its queries are read and its result is written.
GROUP_KEYS = 16
# ASSUME: regions are cut as if a group cost more, hence coarser; each tile cuts them again by its own cost.
REGION_KEYS = 128


def regions(graph, region_rows=128):
    """Row boundaries int32 [R+1] of the regions: the best cut into at most `region_rows` rows, keys gathered."""
    return cut(graph, region_rows, SLICE_RUN, True, overhead=REGION_KEYS)


def cut(graph, rows, width, gathered, bounds=None, overhead=GROUP_KEYS):
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
    back = _partition(indptr, units, graph.row_class, n_units, first, rows, unit_keys, step, overhead)
    ptr = [n]
    while ptr[-1]:
        ptr.append(int(back[ptr[-1]]))
    return np.array(ptr[::-1], np.int32)


def unions(graph, ptr, width, gathered):
    """int64 [G]: keys that each group of rows ``ptr[g]..ptr[g+1]`` sees, or aligned blocks of `width` keys."""
    indptr, units, n_units = unit_rows(graph, width, gathered)
    return _unions(indptr, units, graph.row_class, n_units, np.asarray(ptr, np.int64))


def unit_rows(graph, width, gathered):
    """``(indptr, units, n_units)``: what each distinct row touches, its keys or aligned blocks of `width` keys."""
    if gathered:
        return graph.indptr, graph.indices, graph.n_cols
    blocks = graph.indices // np.int32(width)
    new = np.ones(len(blocks), bool)
    new[1:] = blocks[1:] != blocks[:-1]
    new[graph.indptr[:-1][graph.indptr[:-1] < len(blocks)]] = True
    indptr = np.concatenate(([0], np.cumsum(new)))[graph.indptr]
    return indptr, blocks[new], -(-graph.n_cols // width)


@njit(cache=True)
def _partition(indptr, units, row_class, n_units, first, most, unit_keys, step, overhead):
    """Start of the last group of the best partition of rows 0..j, for every j."""
    n = len(row_class)
    best, back = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    # Rows that equal their predecessor form a sequence; a unit remembers the sequence that had it last. A window
    # spans at most `most` sequences, so that ages from there on are alike.
    sequence, current = np.empty(n, np.int64), -1
    last = np.full(n_units, -most - 1, np.int64)
    age = np.zeros(most + 1, np.int64)
    # Units of rows s..j for the window starting at each s, held at s % most.
    union = np.zeros(most, np.int64)
    for j in range(n):
        lo = max(j - most + 1, first[j])
        begin, end = indptr[row_class[j]], indptr[row_class[j] + 1]
        if j == 0 or row_class[j] != row_class[j - 1]:
            current += 1
            age[:] = 0
            for e in range(begin, end):
                age[min(current - last[units[e]], most)] += 1
                last[units[e]] = current
        sequence[j] = current
        union[j % most] = end - begin
        if j > 0 and sequence[j - 1] != current:
            added, here = end - begin, current
            for s in range(j - 1, lo - 1, -1):
                if sequence[s] != here:
                    here = sequence[s]
                    added -= age[current - here]
                union[s % most] += added
        best[j + 1] = np.iinfo(np.int64).max
        for s in range(lo, j + 1):
            keys = -(-union[s % most] // step) * step * unit_keys
            cost = best[s] + ((j + 1 - s + GROUP_ROWS) * (keys + overhead) if keys else 0)
            if cost < best[j + 1]:
                best[j + 1], back[j + 1] = cost, s
    return back


@njit(cache=True)
def _unions(indptr, units, row_class, n_units, ptr):
    seen = np.full(n_units, -1, np.int64)
    count = np.zeros(len(ptr) - 1, np.int64)
    for g in range(len(count)):
        for j in range(ptr[g], ptr[g + 1]):
            if j > ptr[g] and row_class[j] == row_class[j - 1]:
                continue
            for e in range(indptr[row_class[j]], indptr[row_class[j] + 1]):
                if seen[units[e]] != g:
                    seen[units[e]] = g
                    count[g] += 1
    return count
