"""Masks as products: what a tile forbids, as a sum of a few outer products (the GPU's executor, stages T3 to T5).

A mask applied score by score costs several instructions for each. Where the forbidden pairs of a work item are a union
of at most R rectangles (rows x keys), they are ``a @ b`` with ``a`` [M, R] and ``b`` [R, K] of zeros and ones: one more
matrix product of depth R, which the tensor cores add to the scores, scaled to what no score reaches. The windows of an
8 x 8 square of queries need 16: each of 8 image rows forbids some keys, and each of 8 image columns.
"""

import numpy as np

# Beyond this many sets of rows that no union of smaller ones gives, only rows with equal masks are put together.
_MOST_SETS = 96


def factors(forbidden, limit):
    """``(a bool [M, R], b bool [R, K])`` with ``(a @ b) > 0`` equal to `forbidden` (bool [M, K]), or None if R > limit.

    The rows that a key forbids form a set. Of the sets that are no union of smaller ones, groups are merged as long as
    the pieces that they cut the rows into do not become more; each piece is a column of ``a``.
    """
    sets = np.unique(forbidden.T, axis=0)
    sets = _irreducible(sets[sets.any(1)])
    if len(sets) > _MOST_SETS:
        pieces = _pieces(sets)
    else:
        groups = [sets[i : i + 1] for i in range(len(sets))]
        counts = [1] * len(groups)
        while (best := _best_merge(groups, counts)) is not None:
            i, j, count = best
            groups[i], counts[i] = np.concatenate((groups[i], groups[j])), count
            del groups[j], counts[j]
        pieces = np.concatenate([_pieces(group) for group in groups]) if groups else np.zeros((0, len(forbidden)), bool)
        pieces = np.unique(pieces, axis=0)
    if len(pieces) > limit:
        return None
    # A piece takes every key that forbids all of it.
    b = (~forbidden).astype(np.float32).T @ pieces.T.astype(np.float32) == 0
    return pieces.T.copy(), b.T.copy()


def _irreducible(sets):
    """Those of distinct sets (bool [n, M]) that are not the union of others."""
    size = sets.sum(1)
    inside = sets.astype(np.int32) @ (~sets).astype(np.int32).T == 0
    smaller = inside & (size[:, None] < size[None, :])
    union = smaller.T.astype(np.int32) @ sets.astype(np.int32) > 0
    return sets[(union != sets).any(1)]


def _pieces(sets):
    """bool [p, M]: classes of rows that the same `sets` contain, without those of no set."""
    _, piece = np.unique(sets.T, axis=0, return_inverse=True)
    pieces = piece.ravel()[None, :] == np.arange(piece.max() + 1)[:, None]
    return pieces[(pieces & sets.any(0)).any(1)]


def _best_merge(groups, counts):
    """``(i, j, pieces)`` of the two groups whose merging saves most pieces (or costs none); None when all cost some."""
    best, found = 1, None
    for i in range(len(groups)):
        for j in range(i + 1, len(groups)):
            count = len(_pieces(np.concatenate((groups[i], groups[j]))))
            if count - counts[i] - counts[j] < best:
                best, found = count - counts[i] - counts[j], (i, j, count)
                if best < 0:
                    return found
    return found if best <= 0 else None
