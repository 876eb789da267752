"""Capped agglomeration and the order of its clusters: the clustering behind the default `hc` order (stage T2).

As in hierarchical clusterwise SpGEMM (Islam et al., arXiv 2507.21253) the candidates are the rows most similar by the
pattern product A·Aᵀ, and clusters are capped. Unlike it, clusters are compared by the union of their keys, and the
pair merges that increases the area (queries x union) least.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder._growth import grow
from tilewright.attention.reorder._quotient import Quotient, transpose
from tilewright.core.compiled import njit

# Queries of the groups that clusters are chained into: those of the published measure.
GROUP = 64


def link(q: Quotient, near: NDArray[np.int64], *, cap: int, chain: str) -> NDArray[np.int64]:
    """Order of the rows of a `Quotient`, int64 [R]: clusters of at most `cap` queries, put in an order by `chain`.

    near: the candidates of each row, from `similar`. ``tree``: merging goes on without the cap, and the leaves are
    read from end to end. ``growth``: groups of `GROUP` queries are grown of whole clusters (see
    `tilewright.attention.reorder._growth`), which fills groups of a fixed size better.
    """
    caps = np.array([cap, np.inf] if chain == "tree" else [cap], np.float64)
    left, right = _merge(q.indptr, q.indices, q.weight, q.size, near, caps)
    order, ptr = _leaves(q.indptr, q.indices, q.weight, left, right)
    if chain == "tree" or not len(order):
        return order
    indptr, indices = _unions(q.indptr, q.indices, order, ptr, len(q.weight))
    size = np.add.reduceat(q.size[order], ptr[:-1])
    by_unit = transpose(indptr, indices, len(q.weight))
    clusters = Quotient(np.arange(len(size)), size, q.weight, indptr, indices, *by_unit, bare=q.bare[:0])  # type: ignore[misc]  # mypy does not know the length of what is unpacked
    return np.concatenate([order[ptr[c] : ptr[c + 1]] for c in grow(clusters, cap=GROUP, tau=1.0)])


def similar(q: Quotient, neighbors: int) -> NDArray[np.int64]:
    """The at most `neighbors` rows most similar to each row of a `Quotient`, int64 [R, neighbors], -1 where fewer."""
    return _similar(q.indptr, q.indices, q.col_ptr, q.col_rows, q.weight, neighbors)


@njit(cache=True, nogil=True)
def _similar(indptr, indices, col_ptr, col_rows, weight, k):
    """The at most `k` rows of largest Jaccard similarity to each row, int64 [R, k], -1 where there are fewer."""
    n_rows = len(indptr) - 1
    degree = np.zeros(n_rows)
    for r in range(n_rows):
        for e in range(indptr[r], indptr[r + 1]):
            degree[r] += weight[indices[e]]
    out, best = np.full((n_rows, k), -1, np.int64), np.empty(k)
    common, met = np.zeros(n_rows), np.empty(n_rows, np.int64)
    for r in range(n_rows):
        n, best[:] = 0, 0.0
        for e in range(indptr[r], indptr[r + 1]):
            for f in range(col_ptr[indices[e]], col_ptr[indices[e] + 1]):
                other = col_rows[f]
                if common[other] == 0:
                    met[n] = other
                    n += 1
                common[other] += weight[indices[e]]
        for i in range(n):
            other = met[i]
            score = common[other] / (degree[r] + degree[other] - common[other])
            common[other] = 0
            if other == r or score <= best[k - 1]:
                continue
            j = k - 1
            while j > 0 and best[j - 1] < score:
                best[j], out[r, j] = best[j - 1], out[r, j - 1]
                j -= 1
            best[j], out[r, j] = score, other
    return out


@njit(cache=True, nogil=True)
def _common(a, b, weight):
    """Weight of the units in both of two ascending lists."""
    i, j, total = 0, 0, 0.0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            total += weight[a[i]]
            i += 1
            j += 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return total


@njit(cache=True, nogil=True)
def _merge(indptr, indices, weight, size, near, caps):
    """Children of every merge, int64 [merges] each: rows are nodes 0..R-1, merge m is node R+m."""
    n_rows, k = near.shape
    n_nodes = 2 * n_rows
    # Unions of all clusters one after the other; begin/end of each, its keys and queries.
    pool, filled = np.empty(2 * len(indices) + 1, np.int32), len(indices)
    pool[:filled] = indices
    begin, end = np.zeros(n_nodes, np.int64), np.zeros(n_nodes, np.int64)
    begin[:n_rows], end[:n_rows] = indptr[:-1], indptr[1:]
    keys, queries = np.zeros(n_nodes), np.zeros(n_nodes)
    queries[:n_rows] = size
    for r in range(n_rows):
        for e in range(indptr[r], indptr[r + 1]):
            keys[r] += weight[indices[e]]
    parent = np.arange(n_nodes)
    # Twice as many neighbours for clusters: those of both children, the cheapest kept.
    around = np.full((n_nodes, 2 * k), -1, np.int64)
    around[:n_rows, :k] = near
    left, right = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    found, price = np.empty(4 * k, np.int64), np.empty(4 * k)
    heap = [(0.0, 0, 0)]
    heap.pop()
    n = n_rows
    for most in caps:
        for i in range(n):
            for j in around[i]:
                if parent[i] == i and j >= 0:
                    j = _root(parent, j)
                    if i != j and queries[i] + queries[j] <= most:
                        cost = _increase(pool, begin, end, keys, queries, weight, i, j)
                        heapq.heappush(heap, (cost, min(i, j), max(i, j)))
        while len(heap):
            _, i, j = heapq.heappop(heap)
            if parent[i] != i or parent[j] != j:
                continue
            need = end[i] - begin[i] + end[j] - begin[j]
            if filled + need > len(pool):
                larger = np.empty(2 * len(pool) + need, np.int32)
                larger[:filled] = pool[:filled]
                pool = larger
            a, b = pool[begin[i] : end[i]], pool[begin[j] : end[j]]
            begin[n] = filled
            p, q = 0, 0
            while p < len(a) or q < len(b):
                if q == len(b) or (p < len(a) and a[p] <= b[q]):
                    unit = a[p]
                    q += q < len(b) and a[p] == b[q]
                    p += 1
                else:
                    unit = b[q]
                    q += 1
                pool[filled] = unit
                filled += 1
                keys[n] += weight[unit]
            end[n], queries[n] = filled, queries[i] + queries[j]
            left[n - n_rows], right[n - n_rows] = i, j
            parent[i] = parent[j] = n
            n_found = 0
            for child in (i, j):
                for other in around[child]:
                    if other < 0:
                        continue
                    other = _root(parent, other)
                    if other == n or (found[:n_found] == other).any():
                        continue
                    found[n_found] = other
                    price[n_found] = _increase(pool, begin, end, keys, queries, weight, n, other)
                    n_found += 1
            cheapest = np.argsort(price[:n_found], kind="mergesort")[: 2 * k]
            for i in range(len(cheapest)):
                other = found[cheapest[i]]
                around[n, i] = other
                if queries[n] + queries[other] <= most:
                    heapq.heappush(heap, (price[cheapest[i]], min(n, other), max(n, other)))
            n += 1
    return left[: n - n_rows], right[: n - n_rows]


@njit(cache=True, nogil=True)
def _root(parent, node):
    """The cluster that a node has become part of; paths are halved on the way."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@njit(cache=True, nogil=True)
def _increase(pool, begin, end, keys, queries, weight, i, j):
    """Increase of the area, queries x keys, if clusters i and j were one."""
    union = keys[i] + keys[j] - _common(pool[begin[i] : end[i]], pool[begin[j] : end[j]], weight)
    return union * (queries[i] + queries[j]) - keys[i] * queries[i] - keys[j] * queries[j]


@njit(cache=True, nogil=True)
def _leaves(indptr, indices, weight, left, right):
    """Leaves of all trees, int64 [R], and where each tree begins, int64 [trees+1].

    Each merge is flipped so that the two rows that meet share most; trees come by their first row.
    """
    n_rows, n_nodes = len(indptr) - 1, len(indptr) - 1 + len(left)
    first, last = np.arange(n_nodes), np.arange(n_nodes)
    flipped, is_root = np.zeros((n_nodes, 2), np.bool_), np.ones(n_nodes, np.bool_)
    lowest = np.arange(n_nodes)
    for m in range(len(left)):
        i, j, node = left[m], right[m], n_rows + m
        is_root[i] = is_root[j] = False
        lowest[node] = min(lowest[i], lowest[j])
        best = -1.0
        for sides in range(4):
            inner = first[i] if sides & 1 else last[i]
            outer = last[j] if sides & 2 else first[j]
            score = _common(
                indices[indptr[inner] : indptr[inner + 1]], indices[indptr[outer] : indptr[outer + 1]], weight
            )
            if score > best:
                best = score
                flipped[node, 0], flipped[node, 1] = sides & 1 > 0, sides & 2 > 0
        first[node] = last[i] if flipped[node, 0] else first[i]
        last[node] = first[j] if flipped[node, 1] else last[j]
    order, n = np.empty(n_rows, np.int64), 0
    roots = np.flatnonzero(is_root)
    stack = [(0, False)]
    stack.pop()
    ptr = np.zeros(len(roots) + 1, np.int64)
    roots = roots[np.argsort(lowest[roots], kind="mergesort")]
    for t in range(len(roots)):
        stack.append((roots[t], False))
        while len(stack):
            node, reverse = stack.pop()
            if node < n_rows:
                order[n] = node
                n += 1
                continue
            m = node - n_rows
            here, there = (left[m], flipped[node, 0] != reverse), (right[m], flipped[node, 1] != reverse)
            stack.append(here if reverse else there)
            stack.append(there if reverse else here)
        ptr[t + 1] = n
    return order, ptr


@njit(cache=True, nogil=True)
def _unions(indptr, indices, order, ptr, n_units):
    """CSR of the ascending units of each cluster ``order[ptr[c]:ptr[c+1]]``."""
    seen, out = np.full(n_units, -1, np.int64), np.empty(len(indices), np.int32)
    union_ptr, n = np.zeros(len(ptr), np.int64), 0
    for c in range(len(ptr) - 1):
        for i in range(ptr[c], ptr[c + 1]):
            for unit in indices[indptr[order[i]] : indptr[order[i] + 1]]:
                if seen[unit] != c:
                    seen[unit] = c
                    out[n] = unit
                    n += 1
        out[union_ptr[c] : n].sort()
        union_ptr[c + 1] = n
    return union_ptr, out[:n].copy()
