"""Unions, cuts and covers of large patterns, compiled (stage T2).

Each function is that of the same step in `cut` and `cover`, entry by entry in place of array by array, and gives the
same result: ten times as fast where a pattern has many entries. To load them takes longer than to cut a small pattern,
and to compile them longer than any; `core.compiled` says when they are used.

indptr, units: what each distinct row touches. row_id: the distinct row of each row. Rows equal to their predecessor are
not read.
"""

import numpy as np
from numba import int32, int64, types, uint8, uint64

from tilewright.core.compiled import njit

_I4, _I8 = int32[::1], int64[::1]


@njit(types.void(_I8, _I4, _I4, int64, _I8, _I8, int32[:, ::1]), cache=True, nogil=True)
def count_windows(indptr, units, row_id, lo, last, before, union):
    """Fill `union` [rows, most] for the rows from `lo` on: units of the rows j-w..j at ``[j - lo, w]``.

    Windows that begin before row 0 are counted as if they began there. last [n_units]: the last row that had each unit,
    ``-most - 1`` at first; before [most]: the unions of row lo - 1, zeros at first. Both are updated.
    """
    most = union.shape[1]
    age = np.zeros(most + 1, np.int64)
    for j in range(lo, lo + len(union)):
        begin, end = indptr[row_id[j]], indptr[row_id[j] + 1]
        # Of a sequence of equal rows the first is read, and the last is the last that had its units.
        if j == 0 or row_id[j] != row_id[j - 1]:
            for e in range(begin, end):
                age[min(j - last[units[e]], most)] += 1
            stop = j + 1
            while stop < len(row_id) and row_id[stop] == row_id[j]:
                stop += 1
            for e in range(begin, end):
                last[units[e]] = stop - 1
        else:
            age[1] = end - begin
        new = end - begin
        for w in range(most):
            # Units of row j that none of the w rows before it has.
            new -= age[w]
            earlier = before[w - 1] if w else 0
            union[j - lo, w] = new + earlier
        for w in range(most):
            before[w] = union[j - lo, w]
        age[:] = 0


@njit(types.void(int32[:, ::1], int64, int64, _I8, int64, int64, int64, int64, _I8, _I8), cache=True, nogil=True)
def fill_best(union, begin, rows, first, step, unit_keys, group_rows, overhead, best, back):
    """Fill `best` and `back` [N_q + 1] for the rows from `begin` on that `union` counts, see `cut.cut`.

    Of equal costs the longest window is taken.
    """
    for j in range(begin, begin + len(union)):
        least, chosen = np.iinfo(np.int64).max, j
        for s in range(max(j - rows + 1, first[j], 0), j + 1):
            keys = -(-np.int64(union[j - begin, j - s]) // step) * step * unit_keys
            cost = best[s] + ((j + 1 - s + group_rows) * (keys + overhead) if keys else 0)
            if cost < least:
                least, chosen = cost, s
        best[j + 1], back[j + 1] = least, chosen


@njit(types.Tuple((_I8, _I4))(_I8, _I4, int64), cache=True, nogil=True)
def blocks_of(indptr, indices, shift):
    """``(indptr, blocks)``: the aligned blocks of ``2**shift`` keys that each distinct row touches, ascending."""
    ptr, n = np.zeros(len(indptr), np.int64), 0
    for r in range(len(indptr) - 1):
        last = np.int64(-1)
        for e in range(indptr[r], indptr[r + 1]):
            n += indices[e] >> shift != last
            last = indices[e] >> shift
        ptr[r + 1] = n
    found = np.empty(n, np.int32)
    for r in range(len(indptr) - 1):
        last, n = np.int64(-1), ptr[r]
        for e in range(indptr[r], indptr[r + 1]):
            if indices[e] >> shift != last:
                last = indices[e] >> shift
                found[n] = last
                n += 1
    return ptr, found


@njit(_I8(_I8, _I4, _I4, int64, _I8), cache=True, nogil=True)
def unions(indptr, units, row_id, n_units, ptr):
    """int64 [G]: distinct units of the rows ``ptr[g]..ptr[g+1]`` of each group."""
    seen, count = np.full(n_units, -1, np.int64), np.zeros(len(ptr) - 1, np.int64)
    for g in range(len(count)):
        for j in range(ptr[g], ptr[g + 1]):
            if j > ptr[g] and row_id[j] == row_id[j - 1]:
                continue
            for e in range(indptr[row_id[j]], indptr[row_id[j] + 1]):
                if seen[units[e]] != g:
                    seen[units[e]] = g
                    count[g] += 1
    return count


@njit(int64(_I4, int64, int64), cache=True, nogil=True)
def _last_equal(row_id, row, hi):
    """End of the sequence of rows equal to `row`, at most `hi`."""
    last = row + 1
    while last < hi and row_id[last] == row_id[row]:
        last += 1
    return last


@njit(_I4(_I4, _I4, int64), cache=True, nogil=True)
def _full_first(keys, seen, rows):
    """`keys`, those that all `rows` see before the others, order kept otherwise."""
    out, n = np.empty_like(keys), 0
    for full in (True, False):
        for key in keys:
            if (seen[key] == rows) == full:
                out[n] = key
                n += 1
    return out


@njit(uint64(uint8[::1]), cache=True, nogil=True)
def _hash(data):
    """FNV-1a of bytes, folded so that the low bits depend on all."""
    value = np.uint64(14695981039346656037)
    for byte in data:
        value = (value ^ np.uint64(byte)) * np.uint64(1099511628211)
    return value ^ (value >> np.uint64(32))


@njit(_I8(uint64[::1], int64), cache=True, nogil=True)
def _rehash(hashes, size):
    table = np.full(size, -1, np.int64)
    for i in range(len(hashes)):
        entry = np.int64(hashes[i] & np.uint64(size - 1))
        while table[entry] >= 0:
            entry = (entry + 1) & (size - 1)
        table[entry] = i
    return table


@njit(uint8[:, ::1](uint8[:, ::1]), cache=True, nogil=True)
def _twice(array):
    out = np.zeros((2 * len(array), array.shape[1]), np.uint8)
    out[: len(array)] = array
    return out


@njit(_I4(_I4, _I4, int64), cache=True, nogil=True)
def _ascending(touched, owner, b):
    """The units `touched`, those whose `owner` is `b`, in order: sorted, or read off where they are many."""
    if 16 * len(touched) < len(owner):
        return np.sort(touched)
    out, n = np.empty_like(touched), 0
    for unit in range(len(owner)):
        if owner[unit] == b:
            out[n] = unit
            n += 1
    return out


@njit(
    uint8[:, ::1](_I8, _I4, _I4, _I8, _I8, int64, int64, int64, int64, int32[:, ::1], _I4, _I4), cache=True, nogil=True
)
def fill_runs(
    indptr, indices, row_id, row_ptr, run_ptr, n_units, shift, height, width, run_keys, run_mask, run_entries
):
    """Fill the runs of all blocks in place; returns the masks, uint8 [n_masks, height * ceil(width / 8)].

    indices: keys. A unit is what a run is filled with: a key of a slice (shift 0), or the aligned block of ``2**shift``
    keys of a block tile, of which `run_keys` [U, 1] takes the first key. run_keys and run_mask hold -1, run_entries
    zeros.
    """
    unit_keys, row_bytes = 1 << shift, (width + 7) // 8
    per_run, mask_bytes = width // unit_keys, height * row_bytes
    # 32 bits, which the nearest caches hold for more keys.
    owner, seen = np.full(n_units, -1, np.int32), np.zeros(n_units, np.int32)
    # The partial run that a unit lies in, or -1, and its first bit there.
    partial_of, bit_of = np.zeros(n_units, np.int32), np.zeros(n_units, np.int32)
    touched = np.empty(n_units, np.int32)
    bits, partial = np.zeros(mask_bytes, np.uint8), np.zeros(1, np.int64)
    masks, hashes = np.zeros((16, mask_bytes), np.uint8), np.zeros(16, np.uint64)
    table, n_masks = np.full(64, -1, np.int64), 0
    for b in range(len(row_ptr) - 1):
        lo, hi, first_run = row_ptr[b], row_ptr[b + 1], run_ptr[b]
        n_runs, n_touched, row = run_ptr[b + 1] - first_run, 0, lo
        while row < hi:
            last = _last_equal(row_id, row, hi)
            for e in range(indptr[row_id[row]], indptr[row_id[row] + 1]):
                unit = indices[e] >> shift
                if owner[unit] != b:
                    owner[unit], seen[unit] = b, 0
                    touched[n_touched] = unit
                    n_touched += 1
                seen[unit] += last - row
            row = last
        units = _ascending(touched[:n_touched], owner, b)
        if unit_keys == 1:
            units = _full_first(units, seen, hi - lo)
        run, place = first_run, 0
        for unit in units:
            if place == per_run:
                run, place = run + 1, 0
            run_keys[run, place] = unit * unit_keys
            run_entries[run] += seen[unit]
            place += 1

        # Partial runs of this block get a bit mask each.
        if len(partial) < n_runs:
            partial = np.zeros(2 * n_runs, np.int64)
        n_partial = 0
        for r in range(n_runs):
            partial[r] = -1
            if run_entries[first_run + r] < (hi - lo) * width:
                partial[r] = n_partial
                n_partial += 1
        if n_partial == 0:
            continue
        if len(bits) < n_partial * mask_bytes:
            bits = np.zeros(2 * n_partial * mask_bytes, np.uint8)
        bits[: n_partial * mask_bytes] = 0
        run, place = 0, 0
        for unit in units:
            if place == per_run:
                run, place = run + 1, 0
            partial_of[unit], bit_of[unit] = partial[run], place
            place += 1
        row = lo
        while row < hi:
            last = _last_equal(row_id, row, hi)
            for e in range(indptr[row_id[row]], indptr[row_id[row] + 1]):
                unit = indices[e] >> shift
                if partial_of[unit] >= 0:
                    bit = bit_of[unit] + indices[e] - (unit << shift)
                    at = partial_of[unit] * mask_bytes + bit // 8
                    for r in range(row - lo, last - lo):
                        bits[at + r * row_bytes] |= np.uint8(1 << (bit % 8))
            row = last

        # Equal masks are held once: a table of mask numbers by hash, compared byte by byte.
        for r in range(n_runs):
            if partial[r] < 0:
                continue
            if n_masks == len(masks):
                masks, hashes = _twice(masks), np.concatenate((hashes, np.zeros_like(hashes)))
            if 2 * n_masks >= len(table):
                table = _rehash(hashes[:n_masks], 4 * len(table))
            mask_bits = bits[partial[r] * mask_bytes : (partial[r] + 1) * mask_bytes]
            key = _hash(mask_bits)
            entry = np.int64(key & np.uint64(len(table) - 1))
            while table[entry] >= 0 and not (
                hashes[table[entry]] == key and np.array_equal(masks[table[entry]], mask_bits)
            ):
                entry = (entry + 1) & (len(table) - 1)
            if table[entry] < 0:
                table[entry], hashes[n_masks] = n_masks, key
                masks[n_masks] = mask_bits
                n_masks += 1
            run_mask[first_run + r] = table[entry]
    return masks[:n_masks].copy()
