"""Gathers and sums of the backward on a CPU, compiled: one pass each, in one order, which torch takes several for.

Tokens are float32 [B, H, N, D]; those of the batch entries from `b` on, and of the heads from `head` on, are meant.
rows: the token of each of R rows, -1 for none.
"""

from numba import float32, int32, int64, types, uint64

from tilewright.core.compiled import njit

_F2, _F4 = float32[:, ::1], float32[:, :, :, ::1]
_I1, _I3 = int32[::1], int32[:, :, ::1]


@njit(types.void(_F4, int64, _I1, float32, _F4), cache=True, nogil=True)
def gather(tokens, b, rows, factor, out):
    """Write `factor` times the tokens `rows` of all heads to `out` [H, E, R, D], E batch entries; zeros for none."""
    heads, entries, count, dim = out.shape
    for h in range(heads):
        for e in range(entries):
            source, into = tokens[b + e, h], out[h, e]
            for r in range(count):
                row = rows[r]
                if row < 0:
                    for d in range(dim):
                        into[r, d] = 0
                else:
                    # An index that cannot be negative is not wrapped around.
                    at = uint64(row)
                    for d in range(dim):
                        into[r, d] = factor * source[at, d]


@njit(types.void(_F4, int64, int64, _I1, float32, _F4), cache=True, nogil=True)
def add(sums, b, head, rows, factor, values):
    """Add `factor` times values [h, E, R, D] to the tokens `rows` of `sums`, in the order of the rows."""
    heads, entries, count, dim = values.shape
    for h in range(heads):
        for e in range(entries):
            into, source = sums[b + e, head + h], values[h, e]
            for r in range(count):
                row = rows[r]
                if row >= 0:
                    at = uint64(row)
                    for d in range(dim):
                        into[at, d] += factor * source[r, d]


@njit(types.void(_F2, int64, _I3, _F4), cache=True, nogil=True)
def add_places(sums, head, places, values):
    """Add values [h, E * n, M, K] to `sums` [H, T]: that of a pair to its place in places [n or 1, M, K].

    E: batch entries, one after the other. A place T or larger is none.
    """
    heads, items, rows, keys = values.shape
    least, most = len(places), sums.shape[1]
    for h in range(heads):
        into = sums[head + h]
        for i in range(items):
            for m in range(rows):
                at, value = places[i % least, m], values[h, i, m]
                for k in range(keys):
                    place = at[k]
                    if place < most:
                        into[uint64(place)] += value[k]
