"""Iterative and hierarchical clustering as the IPDPS'26 artifact describes them, made to work (stage T2).

Both run on quotient rows: the blocks of `col_block` columns that a row touches. The artifact holds them in one
machine word per row, which overflows past 31 blocks, and its iterative clustering returns nothing; lists of blocks
have no such limit.
"""

import heapq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.blocks.cut import unit_rows
from tilewright.core.compiled import njit

if TYPE_CHECKING:
    from tilewright.graph import Graph


def iterative(graph: "Graph", col_block: int, tau: float, cap: int | None, rounds: int) -> NDArray[np.int32]:
    """Row order int32 [N_q] of the published iterative clustering.

    Seeds in natural order; `rounds` ascending scans of the unassigned rows that shared a block with the group when
    the scan began; a row joins when its Jaccard distance to the group's union is at most `tau`, and widens the union.
    A group ends at `cap` rows, when given.
    """
    indptr, units, n_units = unit_rows(graph, col_block, False)
    return _iterative(indptr, units, graph.row_id, n_units, tau, np.inf if cap is None else cap, rounds)


@njit(cache=True)
def _iterative(indptr, units, row_id, n_units, tau, cap, rounds):
    n = len(row_id)
    order, filled = np.empty(n, np.int32), 0
    assigned = np.zeros(n, np.bool_)
    # Scan since which each unit is in the group's union; a scan reads only rows that met an older one.
    since = np.full(n_units, -1, np.int64)
    scan = 0
    for seed in range(n):
        if assigned[seed]:
            continue
        oldest, size, union = scan, 1, 0
        assigned[seed] = True
        order[filled] = seed
        filled += 1
        for e in range(indptr[row_id[seed]], indptr[row_id[seed] + 1]):
            since[units[e]] = scan
            union += 1
        for _ in range(rounds):
            scan += 1
            for row in range(seed + 1, n):
                if size >= cap:
                    break
                if assigned[row]:
                    continue
                begin, end = indptr[row_id[row]], indptr[row_id[row] + 1]
                common, candidate = 0, False
                for e in range(begin, end):
                    if since[units[e]] >= oldest:
                        common += 1
                        candidate |= since[units[e]] < scan
                if candidate and 1 - common / (union + end - begin - common) <= tau:
                    assigned[row] = True
                    order[filled] = row
                    filled += 1
                    size += 1
                    for e in range(begin, end):
                        if since[units[e]] < oldest:
                            since[units[e]] = scan
                            union += 1
        scan += 1
    return order


def hierarchical(graph: "Graph", col_block: int, neighbors: int, mean_size: float) -> NDArray[np.int32]:
    """Row order int32 [N_q] of the published hierarchical clustering.

    Bottom-up: the pair of clusters with the smallest Hamming distance of their unions merges, among the at most
    `neighbors` clusters that share most blocks with each; it stops at a mean of `mean_size` rows. Clusters by their
    first row, members in the order of merging.
    """
    indptr, units, n_units = unit_rows(graph, col_block, False)
    left, right = _hierarchical(indptr, units, graph.row_id, n_units, neighbors, mean_size)
    members = {row: [row] for row in range(graph.n_rows)}
    for merged, (i, j) in enumerate(zip(left.tolist(), right.tolist(), strict=True), graph.n_rows):
        members[merged] = members.pop(i) + members.pop(j)
    return np.array([row for cluster in sorted(members.values(), key=min) for row in cluster], np.int32)


@njit(cache=True)
def _hierarchical(indptr, units, row_id, n_units, neighbors, mean_size):
    """Clusters that each merge joins, int64 [merges] each: rows are clusters 0..N-1, merge m makes cluster N+m."""
    n = len(row_id)
    alive, length = np.zeros(2 * n, np.bool_), np.zeros(2 * n, np.int64)
    pattern = [units[indptr[c] : indptr[c + 1]] for c in row_id]
    # Clusters that touch each unit, dead ones among them, as linked lists.
    head, link, name = np.full(n_units, -1, np.int64), [0], [0]
    link.pop()
    name.pop()
    shared, met = np.zeros(2 * n, np.int64), np.empty(2 * n, np.int64)
    heap = [(0, 0, 0)]
    heap.pop()
    left, right = np.empty(n, np.int64), np.empty(n, np.int64)
    clusters, next_id = n, n
    for i in range(n):
        alive[i], length[i] = True, len(pattern[i])
        for unit in pattern[i]:
            link.append(head[unit])
            name.append(i)
            head[unit] = len(link) - 1
    for i in range(n):
        _push(heap, i, False, pattern[i], head, link, name, alive, length, shared, met, neighbors)
    while clusters > 1 and n < mean_size * clusters and len(heap):
        _, i, j = heapq.heappop(heap)
        if not (alive[i] and alive[j]):
            continue
        merged = np.union1d(pattern[i], pattern[j])
        pattern.append(merged)
        left[next_id - n], right[next_id - n] = i, j
        alive[i] = alive[j] = False
        alive[next_id], length[next_id] = True, len(merged)
        for unit in merged:
            link.append(head[unit])
            name.append(next_id)
            head[unit] = len(link) - 1
        _push(heap, next_id, True, merged, head, link, name, alive, length, shared, met, neighbors)
        next_id += 1
        clusters -= 1
    return left[: next_id - n], right[: next_id - n]


@njit(cache=True)
def _push(heap, cluster, both, pattern, head, link, name, alive, length, shared, met, neighbors):
    """Queue the pairs of `cluster` with the clusters that share most units with it: all, or those of larger id."""
    n_met = 0
    for unit in pattern:
        at = head[unit]
        while at >= 0:
            other = name[at]
            at = link[at]
            if other != cluster and alive[other]:
                if shared[other] == 0:
                    met[n_met] = other
                    n_met += 1
                shared[other] += 1
    # ASSUME: of clusters that share equally many, the oldest; the artifact leaves it to the iteration of a set.
    rank = np.empty(n_met, np.int64)
    for i in range(n_met):
        rank[i] = met[i] - shared[met[i]] * len(shared)
    for i in np.argsort(rank)[:neighbors]:
        other = met[i]
        if both or cluster < other:
            distance = length[cluster] + length[other] - 2 * shared[other]
            heapq.heappush(heap, (distance, min(cluster, other), max(cluster, other)))
    for i in range(n_met):
        shared[met[i]] = 0
