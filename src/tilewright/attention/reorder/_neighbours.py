"""Coordinates of the rows of a pattern, guessed from which rows are neighbours (stage T2).

Of two neighbours on a grid, no row is closer to both than they are to each other.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder._axes import AXES
from tilewright.attention.reorder._quotient import Quotient, rename, transpose
from tilewright.core.compiled import njit

# Rows compared with each row. Windows ten times as long along one axis than along the other need about 20.
NEAR = 32
# Of the keys that tell two neighbours apart, about so many are counted to find near rows, all to find the nearest.
TELLING = 16
# Rows that are looked at first: where their neighbours are not those of a grid, the others are not.
PROBES = 24


def coordinates(q: Quotient) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """``(coordinates int64 [R, axes], part int64 [R])`` of the grid that neighbouring rows may form, or None."""
    n_rows = len(q.rows)
    order, *csr = _local(q.indptr, q.indices, q.col_ptr, q.col_rows)
    sample = _sampled(*csr)
    if n_rows > 4 * PROBES * NEAR:
        probes = np.random.default_rng(0).choice(n_rows, PROBES, replace=False)
        around = _nearest(csr, sample, probes)[0]
        around = np.unique(np.append(around[around >= 0], probes))
        near, apart = np.full((n_rows, NEAR), -1, np.int32), np.zeros((n_rows, NEAR), np.int32)
        near[around], apart[around] = _nearest(csr, sample, around)
        common = np.bincount(csr[1]) > 1
        pairs = zip(probes, _neighbours(near, apart, probes), strict=True)
        if not all(_amid(*csr, row, beside, common) for row, beside in pairs):  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
            return None
    every = np.arange(n_rows)
    near, apart = _nearest(csr, sample, every)
    adjacent = _neighbours(near, apart, every)
    found = None if (adjacent[:, -1] >= 0).any() else _develop(adjacent[:, :-1])
    if found is None:
        return None
    place = np.argsort(order)
    return found[0][place], found[1][place]


def _amid(indptr, indices, row, beside, common):
    """Whether `row` may lie amid the neighbours `beside` on a grid.

    They are few, it sees whatever two of them see, and one of them sees whatever it sees. common: bool, the units that
    several rows see.
    """
    if beside[-1] >= 0:
        return False
    own, *others = (indices[indptr[r] : indptr[r + 1]] for r in (row, *beside[beside >= 0]))
    seen = np.bincount(np.concatenate((own[:0], *others)), minlength=len(common))
    return bool((seen[own[common[own]]] > 0).all() and np.isin(np.flatnonzero(seen > 1), own).all())


def _local(indptr, indices, col_ptr, col_rows):
    """``(order, indptr, indices)``: rows and units renumbered as a breadth-first search meets them.

    What is near in the pattern then is near in memory: of shuffled tokens, near rows are found four times as fast.
    """
    n_rows = len(indptr) - 1
    order, met, name = np.empty(n_rows, np.int64), np.zeros(n_rows, np.bool_), np.full(len(col_ptr) - 1, -1, np.int32)
    ptr, out = np.zeros(n_rows + 1, np.int64), np.empty(len(indices), np.int32)
    _search(indptr, indices, col_ptr, col_rows, order, met, name, ptr, out)
    return order, ptr, out


@njit(cache=True)
def _search(indptr, indices, col_ptr, col_rows, order, met, name, ptr, out):
    """Write what `_local` returns."""
    n, named, at = 0, 0, 0
    for first in range(len(order)):
        if not met[first]:
            met[first], order[n] = True, first
            n += 1
        while at < n:
            row = order[at]
            ptr[at + 1] = ptr[at] + indptr[row + 1] - indptr[row]
            for e in range(indptr[row], indptr[row + 1]):
                unit = indices[e]
                if name[unit] < 0:
                    name[unit] = named
                    named += 1
                    for f in range(col_ptr[unit], col_ptr[unit + 1]):
                        other = col_rows[f]
                        if not met[other]:
                            met[other], order[n] = True, other
                            n += 1
                out[ptr[at] + e - indptr[row]] = name[unit]
            at += 1


def _sampled(indptr, indices):
    """``(indptr, indices, col_ptr, col_rows)`` of a part of the units, enough to tell which rows are near."""
    n_units, generator = int(indices.max()) + 1, np.random.default_rng(0)
    some = generator.choice(len(indptr) - 1, min(len(indptr) - 1, PROBES), replace=False)
    col_ptr, col_rows = transpose(indptr, indices, n_units)
    apart = _near_rows(indptr, indices, col_ptr, col_rows, indptr, indices, n_units, some)[1][:, 0]
    share = TELLING / max(TELLING, np.median(apart[apart > 0])) if apart.any() else 1.0
    name = np.full(n_units, -1, np.int32)
    kept = generator.random(n_units) < share
    name[kept] = np.arange(kept.sum())
    indptr, indices = rename(indptr, indices, name)
    return indptr, indices, *transpose(indptr, indices, int(kept.sum()))


def _nearest(csr, sample, rows):
    """``(near, apart)``, int32 [len(rows), NEAR] each: rows with the fewest units that only one of the two sees, the
    nearest first, and the number of these units; -1 where there are fewer rows."""
    workers, n_units = max(1, min(len(os.sched_getaffinity(0)), len(rows) // 1024)), int(csr[1].max()) + 1
    with ThreadPoolExecutor(workers) as pool:
        some = partial(_near_rows, *sample, *csr, n_units)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
        parts = list(pool.map(some, np.array_split(rows, workers)))
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def _near_rows(indptr, indices, col_ptr, col_rows, full_ptr, full_indices, n_units, rows):
    """`_nearest` of some `rows`: chosen by the units of a sample, ordered by all units."""
    n_rows = len(indptr) - 1
    near, apart = np.full((len(rows), NEAR), -1, np.int32), np.zeros((len(rows), NEAR), np.int32)
    common, met, marked = np.zeros(n_rows, np.int32), np.empty(n_rows, np.int32), np.full(n_units, -1, np.int32)
    made = near, apart, common, met, marked, *np.empty((2, NEAR), np.int32)
    _compare(indptr, indices, col_ptr, col_rows, full_ptr, full_indices, rows, *made)
    return near, apart


@njit(cache=True, nogil=True)
def _compare(
    indptr, indices, col_ptr, col_rows, full_ptr, full_indices, rows, near, apart, common, met, marked, best, least
):
    """Write what `_near_rows` returns."""
    for i in range(len(rows)):
        row, n = rows[i], 0
        for e in range(indptr[row], indptr[row + 1]):
            unit = indices[e]
            for f in range(col_ptr[unit], col_ptr[unit + 1]):
                other = col_rows[f]
                if common[other] == 0:
                    met[n] = other
                    n += 1
                common[other] += 1
        filled = 0
        for j in range(n):
            other = met[j]
            far = indptr[row + 1] - indptr[row] + indptr[other + 1] - indptr[other] - 2 * common[other]
            common[other] = 0
            if other == row or (filled == NEAR and far >= least[NEAR - 1]):
                continue
            filled = min(filled + 1, NEAR)
            at = filled - 1
            while at > 0 and least[at - 1] > far:
                least[at], best[at] = least[at - 1], best[at - 1]
                at -= 1
            least[at], best[at] = far, other
        degree = full_ptr[row + 1] - full_ptr[row]
        for e in range(full_ptr[row], full_ptr[row + 1]):
            marked[full_indices[e]] = i
        for j in range(filled):
            other, shared = best[j], 0
            for e in range(full_ptr[other], full_ptr[other + 1]):
                shared += marked[full_indices[e]] == i
            far = degree + full_ptr[other + 1] - full_ptr[other] - 2 * shared
            at = j
            while at > 0 and apart[i, at - 1] > far:
                apart[i, at], near[i, at] = apart[i, at - 1], near[i, at - 1]
                at -= 1
            apart[i, at], near[i, at] = far, other


def _neighbours(near, apart, rows):
    """int32 [len(rows), 2 * AXES + 1], -1 where fewer: of the `near` rows of each of `rows`, its neighbours.

    No third row is nearer to both of two neighbours than they are to each other (the relative neighbourhood graph).
    """
    found = np.full((len(rows), 2 * AXES + 1), -1, np.int32)
    _tell(near, apart, rows, found)
    return found


@njit(cache=True)
def _tell(near, apart, rows, found):
    """Write what `_neighbours` returns."""
    for i in range(len(rows)):
        row, n = rows[i], 0
        for j in range(near.shape[1]):
            other, far = near[row, j], apart[row, j]
            if other < 0 or n == found.shape[1]:
                break
            between = False
            for h in range(j):
                if apart[row, h] >= far:
                    break
                third = near[row, h]
                for g in range(near.shape[1]):
                    if near[third, g] < 0 or apart[third, g] >= far:
                        break
                    if near[third, g] == other:
                        between = True
                        break
                if between:
                    break
            if not between:
                found[i, n] = other
                n += 1


def _develop(adjacent):
    """``(coordinates int64 [R, axes], part int64 [R])`` of rows by their neighbours int32 [R, 2 * AXES], or None."""
    degree = (adjacent >= 0).sum(1)
    # A row amid the grid has two neighbours along each axis.
    seeds = np.argsort(-degree, kind="stable")
    coordinates, part, period = _walk(adjacent, seeds)
    if period is None:
        return None
    coordinates = np.where(period > 0, coordinates % np.maximum(period, 1), coordinates)
    least = np.full((int(part.max()) + 1, coordinates.shape[1]), len(part))
    np.minimum.at(least, part, coordinates)
    coordinates -= least[part]
    used = max(1, int((coordinates.max(0) > 0).sum()))
    return coordinates[:, :used], part


@njit(cache=True)
def _walk(adjacent, seeds):
    """``(coordinates, part, period)``, the last int64 [axes], 0 where an axis has an end; None where there is no grid.

    The directions of a row are carried to its neighbours: the corner of a square that three rows lie in is the one row
    next to both others.
    """
    n_rows, n_ways = adjacent.shape
    # Along axis a, way 2a leads up and 2a + 1 down.
    way = np.full((n_rows, n_ways), -1, np.int32)
    coordinates, part = np.zeros((n_rows, n_ways // 2), np.int64), np.full(n_rows, -1, np.int64)
    period = np.zeros(n_ways // 2, np.int64)
    queue, n_parts = np.empty(n_rows, np.int64), 0
    for seed in seeds:
        if part[seed] >= 0:
            continue
        axis = 0
        for i in range(n_ways):
            one = adjacent[seed, i]
            if one < 0 or _known(way, seed, one):
                continue
            opposite = -1
            for j in range(i + 1, n_ways):
                other = adjacent[seed, j]
                if other >= 0 and not _known(way, seed, other) and _corner(adjacent, one, other, seed) < 0:
                    if opposite >= 0:
                        return coordinates, part, None
                    opposite = other
            way[seed, 2 * axis] = one
            way[seed, 2 * axis + 1] = opposite
            axis += 1
            if axis == n_ways // 2:
                break
        part[seed], queue[0], n, at = n_parts, seed, 1, 0
        while at < n:
            row = queue[at]
            at += 1
            for a in range(n_ways):
                other = way[row, a]
                if other < 0:
                    continue
                if part[other] < 0:
                    part[other], queue[n] = n_parts, other
                    n += 1
                    coordinates[other] = coordinates[row]
                    coordinates[other, a // 2] += 1 - 2 * (a % 2)
                    way[other, a ^ 1] = row
                    for b in range(n_ways):
                        if b // 2 != a // 2 and way[row, b] >= 0:
                            way[other, b] = _corner(adjacent, other, way[row, b], row)
                    for i in range(n_ways):
                        if adjacent[other, i] >= 0 and not _known(way, other, adjacent[other, i]):
                            if way[other, a] >= 0:
                                return coordinates, part, None
                            way[other, a] = adjacent[other, i]
                elif part[other] != n_parts:
                    return coordinates, part, None
                else:
                    # Around the end of an axis, the same row is met again a period further.
                    for b in range(n_ways // 2):
                        step = (1 - 2 * (a % 2)) if b == a // 2 else 0
                        around = abs(coordinates[row, b] + step - coordinates[other, b])
                        if around:
                            if period[b] and period[b] != around:
                                return coordinates, part, None
                            period[b] = around
        n_parts += 1
    return coordinates, part, period


@njit(cache=True)
def _known(way, row, other):
    return (way[row] == other).any()


@njit(cache=True)
def _corner(adjacent, one, other, besides):
    """The row next to `one` and to `other`, besides that one; -1 where there is none."""
    for i in range(adjacent.shape[1]):
        for j in range(adjacent.shape[1]):
            if adjacent[one, i] >= 0 and adjacent[one, i] == adjacent[other, j] and adjacent[one, i] != besides:
                return adjacent[one, i]
    return -1
