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
    caps = (cap, np.inf) if chain == "tree" else (cap,)
    order, ptr = _leaves(q, *_merge(q, near, caps))
    if chain == "tree" or not len(order):
        return order
    indptr, indices = _unions(q, order, ptr)
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


def _merge(q, near, caps):
    """Children of every merge, lists of ints: rows are nodes 0..R-1, merge m is node R+m."""
    n_rows, k = near.shape
    units, held = np.split(q.indices, q.indptr[1:-1]), np.zeros(len(q.weight))
    keys, queries = np.zeros(2 * n_rows), np.zeros(2 * n_rows)
    keys[:n_rows], queries[:n_rows] = [q.weight[each].sum() for each in units], q.size
    parent = list(range(n_rows))
    around = [[other for other in row if other >= 0] for row in near.tolist()]
    left: list[int] = []
    right: list[int] = []
    heap: list[tuple[float, int, int]] = []

    def root(node):
        # The cluster that a node has become part of; paths are halved on the way.
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def increase(i, others):
        # Of the area, queries x keys, if cluster i and each of the others were one.
        held[units[i]] = q.weight[units[i]]
        theirs = [units[j] for j in others]
        begin = np.cumsum([0, *map(len, theirs[:-1])])
        their_keys, their_queries = keys[others], queries[others]
        union = keys[i] + their_keys - np.add.reduceat(held[np.concatenate(theirs)], begin)
        held[units[i]] = 0
        return union * (queries[i] + their_queries) - keys[i] * queries[i] - their_keys * their_queries

    def offer(i, others, costs, most):
        for at in np.flatnonzero(queries[others] <= most - queries[i]).tolist():
            heapq.heappush(heap, (float(costs[at]), min(i, others[at]), max(i, others[at])))

    for most in caps:
        for i in range(len(parent)):
            others = [j for j in map(root, around[i]) if j != i] if parent[i] == i else []
            if others:
                offer(i, others, increase(i, others), most)
        while heap:
            _, i, j = heapq.heappop(heap)
            if parent[i] != i or parent[j] != j:
                continue
            n = len(parent)
            held[units[i]] = 1
            units.append(np.sort(np.concatenate((units[i], units[j][held[units[j]] == 0]))))
            held[units[i]] = 0
            keys[n], queries[n] = q.weight[units[n]].sum(), queries[i] + queries[j]
            left.append(i)
            right.append(j)
            parent[i] = parent[j] = n
            parent.append(n)
            # Twice as many neighbours for clusters: those of both children, the cheapest kept.
            found = [other for other in dict.fromkeys(map(root, around[i] + around[j])) if other != n]
            around.append(found)
            if found:
                costs = increase(n, found)
                cheapest = costs.argsort(kind="stable")[: 2 * k]
                around[n] = [found[c] for c in cheapest.tolist()]
                offer(n, around[n], costs[cheapest], most)
            units[i] = units[j] = q.indices[:0]
            around[i] = around[j] = []
    return left, right


def _leaves(q, left, right):
    """Leaves of all trees, int64 [R], and where each tree begins, int64 [trees + 1].

    Each merge is flipped so that the two rows that meet share most; trees come by their first row.
    """
    n_rows, held = len(q.rows), np.zeros(len(q.weight))
    units = np.split(q.indices, q.indptr[1:-1])
    ends = [(row, row) for row in range(n_rows)]
    lowest, flipped = list(range(n_rows)), []
    for i, j in zip(left, right, strict=True):
        scores = np.zeros((2, 2))
        for inner in (0, 1):
            own = units[ends[i][1 - inner]]
            held[own] = q.weight[own]
            scores[:, inner] = [held[units[outer]].sum() for outer in ends[j]]
            held[own] = 0
        second, first = divmod(int(scores.argmax()), 2)
        flipped.append((first, second))
        ends.append((ends[i][first], ends[j][1 - second]))
        lowest.append(min(lowest[i], lowest[j]))
    roots = sorted(set(range(len(ends))) - {*left, *right}, key=lowest.__getitem__)
    order: list[int] = []
    ptr = [0]
    for tree in roots:
        stack = [(tree, 0)]
        while stack:
            node, reverse = stack.pop()
            if node < n_rows:
                order.append(node)
                continue
            children = zip((left[node - n_rows], right[node - n_rows]), flipped[node - n_rows], strict=True)
            here, there = ((child, flip ^ reverse) for child, flip in children)
            stack += [here, there] if reverse else [there, here]
        ptr.append(len(order))
    return np.array(order, np.int64), np.array(ptr)


def _unions(q, order, ptr):
    """CSR of the ascending units of each cluster ``order[ptr[c]:ptr[c+1]]``."""
    cluster = np.empty(len(order), np.int64)
    cluster[order] = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    own = np.unique(np.repeat(cluster, np.diff(q.indptr)) * len(q.weight) + q.indices)
    cluster, indices = np.divmod(own, len(q.weight))
    return np.searchsorted(cluster, np.arange(len(ptr))), indices.astype(np.int32)
