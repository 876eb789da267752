"""Masks as products: what a tile forbids, as a sum of a few outer products (the GPU's executor, stages T3 to T5).

A mask applied score by score costs several instructions for each. Where the forbidden pairs of a work item are a union
of at most R rectangles (rows x keys), they are ``a @ b`` with ``a`` [M, R] and ``b`` [R, K] of zeros and ones: one more
matrix product of depth R, which the tensor cores add to the scores, scaled to what no score reaches. The windows of an
8 x 8 square of queries need 16: each of 8 image rows forbids some keys, and each of 8 image columns.
"""

import numpy as np

from tilewright.attention.masks import distinct_rows

# Beyond this many sets of rows that no union of smaller ones gives, only rows with equal masks are put together.
_MOST_SETS = 96
# Pairs of sets that are compared at a time, in words.
_AT_ONCE = 1 << 18


def factors(forbidden: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    """``(a bool [M, R], b bool [R, K])`` with ``(a @ b) > 0`` equal to `forbidden` (bool [M, K]), or None if R > limit.

    The rows that a key forbids form a set. Of the sets that are no union of smaller ones, groups are merged as long as
    the pieces that they cut the rows into do not become more; each piece is a column of ``a``.
    """
    packed, of_key = distinct_rows(np.packbits(forbidden, axis=0).T)
    sets = np.unpackbits(packed, axis=1, count=len(forbidden)).view(bool)
    least = sets[_irreducible(_words(packed))]
    labels = _merged(least) if len(least) <= _MOST_SETS else _classes(least)
    found = [row == np.arange(1, row.max() + 1)[:, None] for row in labels]
    pieces = np.unique(np.concatenate([np.zeros((0, len(forbidden)), bool), *found]), axis=0)
    if len(pieces) > limit:
        return None
    # A piece takes every key that forbids all of it.
    b = (~sets).astype(np.float32) @ pieces.T.astype(np.float32) == 0
    return pieces.T.copy(), b[of_key].T.copy()


def _words(packed):
    """uint64 [n, words] of bits in bytes, uint8 [n, bytes]."""
    padded = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def _classes(sets):
    """int64 [1, M]: the pieces that all of `sets` (bool [n, M]) cut the rows into, from 1 on; 0 for rows of no set."""
    _, label = distinct_rows(np.packbits(sets, axis=0).T)
    # Rows of no set are the first of all, where there are any.
    return label[None, :] + (0 if (~sets.any(0)).any() else 1)


def _irreducible(sets):
    """bool [n]: which of distinct sets (bits, uint64 [n, words]) are not the union of others, and not empty."""
    found, at_once = np.zeros(len(sets), bool), max(1, _AT_ONCE // max(1, sets.size))
    for lo in range(0, len(sets), at_once):
        some = sets[lo : lo + at_once]
        inside = ~(sets & ~some[:, None]).any(2)
        inside[np.arange(len(some)), lo + np.arange(len(some))] = False
        union = np.bitwise_or.reduce(np.where(inside[:, :, None], sets, np.uint64(0)), axis=1)
        found[lo : lo + at_once] = (union != some).any(1)
    return found


def _merged(sets):
    """int64 [groups, M]: for each group of `sets` (bool [n, M]) the piece that a row lies in, from 1 on; 0 for none.

    The two groups are merged whose merging saves pieces, the first that are found; where none does, the first that
    cost none.
    """
    labels, counts = sets.astype(np.int64), np.ones(len(sets), np.int64)
    saved = np.array([counts + 1 - _cut(labels, one) for one in labels]).reshape(len(sets), len(sets))
    while len(labels) > 1:
        gain = np.where(np.tri(len(labels), dtype=bool), -1, np.clip(saved, -1, 1))
        i, j = np.unravel_index(gain.argmax(), gain.shape)
        if gain[i, j] < 0:
            break
        both = labels[i] * (labels.shape[1] + 1) + labels[j]
        kinds, label = np.unique(both, return_inverse=True)
        # Rows of neither group stay 0.
        labels[i] = label.ravel() + (kinds[0] > 0)
        counts[i] = np.count_nonzero(kinds)
        labels, counts = np.delete(labels, j, axis=0), np.delete(counts, j)
        saved = np.delete(np.delete(saved, j, axis=0), j, axis=1)
        saved[i] = saved[:, i] = counts + counts[i] - _cut(labels, labels[i])
    return labels


def _cut(groups, one):
    """int64 [n]: pieces that the group `one` and each of `groups` [n, M] cut the rows into together."""
    both = np.sort(groups * (len(one) + 1) + one, axis=1)
    return (both[:, 0] > 0) + np.count_nonzero(np.diff(both, axis=1), axis=1)
