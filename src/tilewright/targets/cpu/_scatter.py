"""Gathers and sums of the backward on a CPU, compiled: one pass each, in one order, which torch takes several for.

Tokens are float32 [N, H, D]. A group of heads begins at `head`; its values are [h, R, D], contiguous by head. rows: the
token of each of the R rows, -1 for none.
"""

from numba import float32, int32, int64, njit, types

_F2, _F3, _F4 = float32[:, ::1], float32[:, :, ::1], float32[:, :, :, ::1]
_I1, _I3 = int32[::1], int32[:, :, ::1]


@njit(types.void(_F3, int64, _I1, float32, _F3), cache=True, nogil=True)
def gather(tokens, head, rows, factor, out):
    """Write `factor` times the tokens `rows` to `out` [h, R, D]; zeros for none."""
    heads, _, dim = out.shape
    for h in range(heads):
        for r in range(len(rows)):
            row = rows[r]
            if row < 0:
                out[h, r, :] = 0
            else:
                for d in range(dim):
                    out[h, r, d] = factor * tokens[row, head + h, d]


@njit(types.void(_F3, int64, _I1, float32, _F3), cache=True, nogil=True)
def add(sums, head, rows, factor, values):
    """Add `factor` times values [h, R, D] to the tokens `rows` of `sums`, in the order of the rows."""
    heads, _, dim = values.shape
    for h in range(heads):
        for r in range(len(rows)):
            row = rows[r]
            if row >= 0:
                for d in range(dim):
                    sums[row, head + h, d] += factor * values[h, r, d]


@njit(types.void(_F2, int64, _I3, _F4), cache=True, nogil=True)
def add_places(sums, head, places, values):
    """Add values [h, E * n, M, K] to `sums` [H, T]: that of a pair to its place in places [n or 1, M, K].

    E: batch entries, one after the other. A place T or larger is none.
    """
    heads, items, rows, keys = values.shape
    least, most = len(places), sums.shape[1]
    for h in range(heads):
        for i in range(items):
            for m in range(rows):
                for k in range(keys):
                    place = places[i % least, m, k]
                    if place < most:
                        sums[head + h, place] += values[h, i, m, k]
