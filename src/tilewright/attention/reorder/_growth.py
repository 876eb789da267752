"""Groups grown row by row: the clustering behind the default `ic` order (stage T2).

Published iterative clustering takes whatever lies within a distance of the seed, in ascending order of rows. Here the
row that costs least joins next: the keys it would add, less a share of what it has in common with the members so far.
The second term makes groups compact: by added keys alone, a window on a grid prefers long strips, whose union is
twice that of a square.
"""

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder._quotient import Quotient
from tilewright.core.compiled import njit

# ASSUME: weight of the common keys against the added ones. Of 0, .01, .1, .3, 1 this gave the least work, or within 2
# % of it, on exact 15x15 windows over grids of 32², 56², 96².
COMPACTNESS = 0.3


def grow(q: Quotient, *, cap: float, tau: float, limit: int | None = None) -> NDArray[np.int64]:
    """Order of the rows of a `Quotient`, int64 [R] (the first `limit` only, when given), group after group.

    A group ends at `cap` queries, or when every candidate would leave more than a share `tau` of its rows x keys area
    empty. The next seed is the row left over beside the last group that most rows around are already placed, so that
    no holes stay.
    """
    n_rows, row = len(q.rows), np.repeat(np.arange(len(q.rows)), np.diff(q.indptr))
    queries = np.bincount(q.indices, q.size[row], len(q.weight))
    degree, whole = (np.bincount(row, each[q.indices], n_rows) for each in (q.weight, q.weight * queries))
    common = q.indptr, q.indices, q.col_ptr, q.col_rows, q.weight, q.size
    outermost = np.argsort(whole, kind="stable")
    placed, touched = np.zeros((2, n_rows), np.bool_)
    # Keys shared with every placed query; the same when the group began; keys shared with the group's union.
    sums = np.zeros((3, n_rows))
    in_union, union = np.zeros(len(q.weight), np.bool_), np.empty(len(q.weight), np.int64)
    near, order = np.empty((2, n_rows), np.int64)
    made = placed, touched, *sums, in_union, union, near, order
    limit = n_rows if limit is None else min(limit, n_rows)
    return order[: _grow(*common, degree, whole, outermost, float(cap), tau, limit, *made)]


@njit(cache=True, nogil=True)
def _grow(
    indptr,
    indices,
    col_ptr,
    col_rows,
    weight,
    size,
    degree,
    whole,
    outermost,
    cap,
    tau,
    limit,
    placed,
    touched,
    shared,
    before,
    overlap,
    in_union,
    union,
    near,
    order,
):
    """The number of rows that are written to `order`, see `grow`."""
    n_union, n_near, n, at = 0, 0, 0, 0
    while n < limit:
        row, most = -1, -1.0
        for i in range(n_near):
            r = near[i]
            touched[r] = False
            if not placed[r] and shared[r] / whole[r] > most:
                row, most = r, shared[r] / whole[r]
        if row < 0:
            while placed[outermost[at]]:
                at += 1
            row = outermost[at]
        n_near, n_union, keys, queries, entries = 0, 0, 0.0, 0.0, 0.0
        while row >= 0:
            placed[row] = True
            order[n] = row
            n += 1
            queries += size[row]
            entries += size[row] * degree[row]
            for e in range(indptr[row], indptr[row + 1]):
                k = indices[e]
                new = not in_union[k]
                if new:
                    in_union[k] = True
                    union[n_union] = k
                    n_union += 1
                    keys += weight[k]
                for f in range(col_ptr[k], col_ptr[k + 1]):
                    r = col_rows[f]
                    if placed[r]:
                        continue
                    if not touched[r]:
                        touched[r] = True
                        near[n_near] = r
                        n_near += 1
                        before[r], overlap[r] = shared[r], 0.0
                    shared[r] += weight[k] * size[row]
                    if new:
                        overlap[r] += weight[k]
            row, least, left = -1, np.inf, 0
            for i in range(n_near):
                r = near[i]
                if placed[r]:
                    continue
                near[left] = r
                left += 1
                if queries + size[r] > cap:
                    continue
                added = degree[r] - overlap[r]
                cost = (added - COMPACTNESS * (shared[r] - before[r]) / queries) / degree[r]
                area = (keys + added) * (queries + size[r])
                if cost < least and entries + size[r] * degree[r] >= (1 - tau) * area:
                    row, least = r, cost
            n_near = left
            if n >= limit:
                row = -1
        for i in range(n_union):
            in_union[union[i]] = False
    return n
