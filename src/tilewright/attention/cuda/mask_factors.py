"""Masks as products: what a tile forbids, as a sum of a few outer products (the GPU's executor, stages T3 to T5).

A mask applied score by score costs several instructions for each. Where the forbidden pairs of a work item are a union
of at most R rectangles (rows x keys), they are ``a @ b`` with ``a`` [M, R] and ``b`` [R, K] of zeros and ones: one more
matrix product of depth R, which the tensor cores add to the scores, scaled to what no score reaches. The windows of an
8 x 8 square of queries need 16: each of 8 image rows forbids some keys, and each of 8 image columns.
"""

import numpy as np

from tilewright.attention.masks import distinct_rows
from tilewright.core.compiled import njit

# Beyond this many sets of rows that no union of smaller ones gives, only rows with equal masks are put together.
_MOST_SETS = 96


def factors(forbidden: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    """``(a bool [M, R], b bool [R, K])`` with ``(a @ b) > 0`` equal to `forbidden` (bool [M, K]), or None if R > limit.

    The rows that a key forbids form a set. Of the sets that are no union of smaller ones, groups are merged as long as
    the pieces that they cut the rows into do not become more; each piece is a column of ``a``.
    """
    packed, of_key = distinct_rows(np.packbits(forbidden, axis=0).T)
    sets = np.unpackbits(packed, axis=1, count=len(forbidden)).view(bool)
    least = sets[_irreducible(words(packed))]
    labels = _merged(least) if len(least) <= _MOST_SETS else _classes(least)
    found = [row == np.arange(1, row.max() + 1)[:, None] for row in labels]
    pieces = np.unique(np.concatenate([np.zeros((0, len(forbidden)), bool), *found]), axis=0)
    if len(pieces) > limit:
        return None
    # A piece takes every key that forbids all of it.
    b = (~sets).astype(np.float32) @ pieces.T.astype(np.float32) == 0
    return pieces.T.copy(), b[of_key].T.copy()


def words(packed: np.ndarray) -> np.ndarray:
    """uint64 [n, words] of bits in bytes, uint8 [n, bytes]."""
    padded = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def _classes(sets):
    """int64 [1, M]: the pieces that all of `sets` (bool [n, M]) cut the rows into, from 1 on; 0 for rows of no set."""
    _, label = distinct_rows(np.packbits(sets, axis=0).T)
    # Rows of no set are the first of all, where there are any.
    return label[None, :] + (0 if (~sets.any(0)).any() else 1)


@njit(cache=True, nogil=True)
def _irreducible(sets):
    """bool [n]: which of distinct sets (bits, uint64 [n, words]) are not the union of others, and not empty."""
    n, words = sets.shape
    found = np.zeros(n, np.bool_)
    union = np.empty(words, np.uint64)
    for i in range(n):
        union[:] = 0
        for j in range(n):
            inside = j != i
            for w in range(words):
                inside = inside and sets[j, w] & ~sets[i, w] == 0
            if inside:
                for w in range(words):
                    union[w] |= sets[j, w]
        for w in range(words):
            found[i] = found[i] or union[w] != sets[i, w]
    return found


@njit(cache=True, nogil=True)
def _merged(sets):
    """int64 [groups, M]: for each group of `sets` (bool [n, M]) the piece that a row lies in, from 1 on; 0 for none.

    The two groups are merged whose merging saves pieces, the first that are found; where none does, the first that
    cost none.
    """
    n, rows = sets.shape
    labels, counts = sets.astype(np.int64), np.ones(n, np.int64)
    saved = np.empty((n, n), np.int64)
    seen, stamp = np.zeros((rows + 1, rows + 1), np.int64), 0
    for i in range(n):
        for j in range(i + 1, n):
            stamp += 1
            saved[i, j] = counts[i] + counts[j] - _cut(labels[i], labels[j], seen, stamp)
    while True:
        best, at_i, at_j = -1, -1, -1
        for i in range(n):
            for j in range(i + 1, n):
                if saved[i, j] > best:
                    best, at_i, at_j = min(saved[i, j], 1), i, j
                if best == 1:
                    break
            if best == 1:
                break
        if best < 0:
            return labels[:n].copy()
        stamp += 1
        counts[at_i] = _merge(labels[at_i], labels[at_j], seen, stamp)
        # The groups after it move up, as do what their merging saves.
        for g in range(at_j, n - 1):
            labels[g], counts[g] = labels[g + 1], counts[g + 1]
        for i in range(at_j):
            for j in range(max(i + 1, at_j), n - 1):
                saved[i, j] = saved[i, j + 1]
        for i in range(at_j, n - 1):
            for j in range(i + 1, n - 1):
                saved[i, j] = saved[i + 1, j + 1]
        n -= 1
        for g in range(n):
            if g != at_i:
                stamp += 1
                i, j = min(g, at_i), max(g, at_i)
                saved[i, j] = counts[i] + counts[j] - _cut(labels[i], labels[j], seen, stamp)


@njit(cache=True, nogil=True)
def _cut(one, two, seen, stamp):
    """Pieces that two groups cut the rows into together. seen: which pairs of pieces were met, by a new `stamp`."""
    count = 0
    for row in range(len(one)):
        if one[row] + two[row] > 0 and seen[one[row], two[row]] != stamp:
            seen[one[row], two[row]] = stamp
            count += 1
    return count


@njit(cache=True, nogil=True)
def _merge(one, two, seen, stamp):
    """Give `one` the pieces of both groups, numbered from 1 on; returns how many. Arguments as in `_cut`."""
    count = 0
    numbers = np.empty_like(seen)
    for row in range(len(one)):
        if one[row] + two[row] > 0:
            if seen[one[row], two[row]] != stamp:
                seen[one[row], two[row]] = stamp
                count += 1
                numbers[one[row], two[row]] = count
            one[row] = numbers[one[row], two[row]]
    return count
