"""Tokens in the order in which a search meets them: what the `rcm` order compiles (stage T2)."""

import numpy as np

from tilewright.core.compiled import njit


@njit(cache=True, nogil=True)
def reached(indptr, indices, degree, seeds):
    """Tokens int64 [N], breadth first from each of the `seeds` that none before it reaches.

    indptr, indices: CSR of each token's neighbours. degree: int [N]; new neighbours of a token come by it, and as in
    `indices` where it is equal.
    """
    found, n = np.empty(len(degree), np.int64), 0
    seen = np.zeros(len(degree), np.bool_)
    for seed in seeds:
        if seen[seed]:
            continue
        seen[seed], found[n], at = True, seed, n
        n += 1
        while at < n:
            first = n
            for other in indices[indptr[found[at]] : indptr[found[at] + 1]]:
                if not seen[other]:
                    seen[other], found[n] = True, other
                    n += 1
            new = found[first:n].copy()
            found[first:n] = new[np.argsort(degree[new], kind="mergesort")]
            at += 1
    return found
