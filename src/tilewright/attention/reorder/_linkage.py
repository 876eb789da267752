"""Capped agglomeration and the order of its clusters: the clustering behind the default `hc` order (stage T2).

As in hierarchical clusterwise SpGEMM (Islam et al., arXiv 2507.21253) the candidates are the rows most similar by the
pattern product A·Aᵀ, and clusters are capped. Unlike it, clusters are compared by the union of their keys, and the
pair merges that increases the area (queries x union) least.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from tilewright.attention.reorder._growth import grow
from tilewright.attention.reorder._quotient import Quotient, take, transpose
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
    # Memory is made here: to compile what makes it takes a third of the time of all.
    n_rows = len(q.indptr) - 1
    degree = np.bincount(np.repeat(np.arange(n_rows), np.diff(q.indptr)), q.weight[q.indices], n_rows)
    out, best = np.full((n_rows, neighbors), -1, np.int64), np.empty(neighbors)
    common, met = np.zeros(n_rows), np.empty(n_rows, np.int64)
    _similar(q.indptr, q.indices, q.col_ptr, q.col_rows, q.weight, degree, out, best, common, met)
    return out


@njit(cache=True, nogil=True)
def _similar(indptr, indices, col_ptr, col_rows, weight, degree, out, best, common, met):
    """Write the rows of largest Jaccard similarity to each row to `out`."""
    k = len(best)
    for r in range(len(degree)):
        n = 0
        for j in range(k):
            best[j] = 0.0
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


@njit(cache=True, nogil=True)
def _common(units, i, i_end, j, j_end, weight):
    """Weight of the units that both of two ascending lists have: the places from i, and from j, to their ends."""
    total = 0.0
    while i < i_end and j < j_end:
        if units[i] == units[j]:
            total += weight[units[i]]
            i += 1
            j += 1
        elif units[i] < units[j]:
            i += 1
        else:
            j += 1
    return total


# A heap of pairs of clusters, the cheapest first, of equally cheap ones that of the first clusters: their costs and, as
# one number, the pairs. Written out: to compile ``heapq`` for tuples takes two seconds.


@njit(cache=True, nogil=True)
def _push(costs, pairs, n, cost, pair):
    """Add a pair to the `n` of a heap."""
    while n > 0:
        up = (n - 1) // 2
        if costs[up] < cost or (costs[up] == cost and pairs[up] <= pair):
            break
        costs[n], pairs[n] = costs[up], pairs[up]
        n = up
    costs[n], pairs[n] = cost, pair


@njit(cache=True, nogil=True)
def _pop(costs, pairs, n):
    """Take the first of `n` pairs from a heap."""
    first, at, last = pairs[0], 0, n - 1
    while 2 * at + 1 < last:
        child = 2 * at + 1
        left, right = costs[child], costs[child + 1]
        if child + 1 < last and (right < left or (right == left and pairs[child + 1] < pairs[child])):
            child += 1
        if costs[last] < costs[child] or (costs[last] == costs[child] and pairs[last] <= pairs[child]):
            break
        costs[at], pairs[at] = costs[child], pairs[child]
        at = child
    costs[at], pairs[at] = costs[last], pairs[last]
    return first


def _merge(indptr, indices, weight, size, near, caps):
    """Children of every merge, int64 [merges] each: rows are nodes 0..R-1, merge m is node R+m."""
    n_rows, k = near.shape
    # Unions of all clusters one after the other; begin/end of each, its keys and queries.
    pool = np.empty(2 * len(indices) + 1, np.int32)
    pool[: len(indices)] = indices
    begin, end = np.zeros((2, 2 * n_rows), np.int64)
    begin[:n_rows], end[:n_rows] = indptr[:-1], indptr[1:]
    keys, queries = np.zeros((2, 2 * n_rows))
    queries[:n_rows] = size
    keys[:n_rows] = np.bincount(np.repeat(np.arange(n_rows), np.diff(indptr)), weight[indices], n_rows)
    # Twice as many neighbours for clusters: those of both children, the cheapest kept.
    around = np.full((2 * n_rows, 2 * k), -1, np.int64)
    around[:n_rows, :k] = near
    parent, children = np.arange(2 * n_rows), np.empty((n_rows, 2), np.int64)
    # A pass begins with as many pairs as its clusters have neighbours, and adds those of each merge.
    heap = np.empty(4 * n_rows * k), np.empty(4 * n_rows * k, np.int64)
    found, price = np.empty(4 * k, np.int64), np.empty(4 * k)
    n = _merged(
        weight, caps, pool, len(indices), begin, end, keys, queries, around, parent, children, *heap, found, price
    )
    return children[:n, 0].copy(), children[:n, 1].copy()


@njit(cache=True, nogil=True)
def _merged(
    weight, caps, pool, filled, begin, end, keys, queries, around, parent, children, costs, pairs, found, price
):
    """The number of merges, see `_merge`, whose `children` are written."""
    n_rows, n_nodes = len(children), len(parent)
    n, waiting = n_rows, 0
    for most in caps:
        for i in range(n):
            for at in range(around.shape[1]):
                j = around[i, at]
                if parent[i] == i and j >= 0:
                    j = _root(parent, j)
                    if i != j and queries[i] + queries[j] <= most:
                        cost = _increase(pool, begin, end, keys, queries, weight, i, j)
                        _push(costs, pairs, waiting, cost, i * n_nodes + j if i < j else j * n_nodes + i)
                        waiting += 1
        while waiting > 0:
            pair = _pop(costs, pairs, waiting)
            waiting -= 1
            i, j = pair // n_nodes, pair % n_nodes
            if parent[i] != i or parent[j] != j:
                continue
            need = end[i] - begin[i] + end[j] - begin[j]
            if filled + need > len(pool):
                larger = np.empty(2 * len(pool) + need, np.int32)
                # A slice that is written compiles its error's text, in a second.
                for p in range(filled):
                    larger[p] = pool[p]
                pool = larger
            begin[n], p, q = filled, begin[i], begin[j]
            while p < end[i] or q < end[j]:
                if q == end[j] or (p < end[i] and pool[p] <= pool[q]):
                    unit = pool[p]
                    if q < end[j] and pool[q] == unit:
                        q += 1
                    p += 1
                else:
                    unit = pool[q]
                    q += 1
                pool[filled] = unit
                filled += 1
                keys[n] += weight[unit]
            end[n], queries[n] = filled, queries[i] + queries[j]
            children[n - n_rows, 0], children[n - n_rows, 1] = i, j
            parent[i] = parent[j] = n
            # The neighbours of both, by what it costs to add them; of equal ones, the first found first.
            n_found = 0
            for side in range(2):
                child = children[n - n_rows, side]
                for at in range(around.shape[1]):
                    if around[child, at] < 0:
                        continue
                    other, known = _root(parent, around[child, at]), False
                    for f in range(n_found):
                        known = known or found[f] == other
                    if other == n or known:
                        continue
                    added = _increase(pool, begin, end, keys, queries, weight, n, other)
                    f = n_found
                    while f > 0 and price[f - 1] > added:
                        found[f], price[f] = found[f - 1], price[f - 1]
                        f -= 1
                    found[f], price[f] = other, added
                    n_found += 1
            for f in range(n_found if n_found < around.shape[1] else around.shape[1]):
                around[n, f] = found[f]
                if queries[n] + queries[found[f]] <= most:
                    _push(costs, pairs, waiting, price[f], found[f] * n_nodes + n)
                    waiting += 1
            n += 1
    return n - n_rows


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
    union = keys[i] + keys[j] - _common(pool, begin[i], end[i], begin[j], end[j], weight)
    return union * (queries[i] + queries[j]) - keys[i] * queries[i] - keys[j] * queries[j]


def _leaves(indptr, indices, weight, left, right):
    """Leaves of all trees, int64 [R], and where each tree begins, int64 [trees+1].

    Each merge is flipped so that the two rows that meet share most; trees come by their first row.
    """
    n_rows, n_nodes = len(indptr) - 1, len(indptr) - 1 + len(left)
    first, last, lowest = np.tile(np.arange(n_nodes), (3, 1))
    flipped, is_root = np.zeros((n_nodes, 2), np.bool_), np.ones(n_nodes, np.bool_)
    tree, order, ptr = np.full(n_rows, -1), np.empty(n_rows, np.int64), np.zeros(n_rows + 1, np.int64)
    stack, reversed_ = np.empty(n_rows, np.int64), np.empty(n_rows, np.bool_)
    made = first, last, lowest, flipped, is_root, tree, order, ptr, stack, reversed_
    return order, ptr[: _read(indptr, indices, weight, left, right, *made) + 1]


@njit(cache=True, nogil=True)
def _read(
    indptr, indices, weight, left, right, first, last, lowest, flipped, is_root, tree, order, ptr, stack, reversed_
):
    """The number of trees, see `_leaves`, whose `order` and `ptr` are written."""
    n_rows, n_nodes = len(order), len(first)
    for m in range(len(left)):
        i, j, node = left[m], right[m], n_rows + m
        is_root[i] = is_root[j] = False
        lowest[node] = lowest[i] if lowest[i] < lowest[j] else lowest[j]
        best = -1.0
        for sides in range(4):
            inner = first[i] if sides & 1 else last[i]
            outer = last[j] if sides & 2 else first[j]
            score = _common(indices, indptr[inner], indptr[inner + 1], indptr[outer], indptr[outer + 1], weight)
            if score > best:
                best = score
                flipped[node, 0], flipped[node, 1] = sides & 1 > 0, sides & 2 > 0
        first[node] = last[i] if flipped[node, 0] else first[i]
        last[node] = first[j] if flipped[node, 1] else last[j]
    # By its first row, the tree of each.
    for node in range(n_nodes):
        if is_root[node]:
            tree[lowest[node]] = node
    n, trees = 0, 0
    for row in range(n_rows):
        if tree[row] < 0:
            continue
        stack[0], reversed_[0], height = tree[row], False, 1
        while height > 0:
            height -= 1
            node, reverse = stack[height], reversed_[height]
            if node < n_rows:
                order[n] = node
                n += 1
                continue
            for side in range(2):
                # The first of the two is taken from the stack first.
                is_left = (side == 1) != reverse
                stack[height] = left[node - n_rows] if is_left else right[node - n_rows]
                reversed_[height] = flipped[node, 0 if is_left else 1] != reverse
                height += 1
        trees += 1
        ptr[trees] = n
    return trees


def _unions(indptr, indices, order, ptr, n_units):
    """CSR of the ascending units of each cluster ``order[ptr[c]:ptr[c+1]]``."""
    of_rows, units = take(indptr, indices, order)
    found = csr_array((np.ones(len(units), np.int8), units, of_rows[ptr]), shape=(len(ptr) - 1, n_units))
    found.sum_duplicates()
    return found.indptr.astype(np.int64), found.indices.astype(np.int32, copy=False)
