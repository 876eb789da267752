"""The cover of an ordered pattern: the key runs of every block and the bit masks that they share (stage T2).

Public entry is `blocks.extract`. Rows equal to their predecessor are read once, so that patterns whose rows repeat cost
no more than their distinct rows.
"""

import numpy as np
from numba import njit

from tilewright.blocks import cut
from tilewright.blocks.tiles import aligned_keys


def cover(graph, row_ptr, tile):
    """``(run_ptr, run_keys, run_mask, masks, run_entries)`` of `blocks.Blocks` for blocks of rows `row_ptr`."""
    height, width = tile.rows, tile.run
    units = cut.unions(graph, row_ptr, width, tile.gathered)
    run_ptr = np.concatenate(([0], np.cumsum(-(-units // width) if tile.gathered else units)))
    n_runs, arrays = run_ptr[-1], (graph.indptr, graph.indices, graph.row_class)
    keys = np.full((n_runs, width if tile.gathered else 1), -1, np.int32)
    run_mask, run_entries = np.full(n_runs, -1, np.int32), np.zeros(n_runs, np.int32)
    unit_keys = 1 if tile.gathered else width
    n_units = -(-graph.n_cols // unit_keys)
    masks = _fill(*arrays, row_ptr, run_ptr, n_units, unit_keys, height, width, keys, run_mask, run_entries)
    if not tile.gathered:
        keys = aligned_keys(keys, width, graph.n_cols)
    return run_ptr, keys, run_mask, masks.reshape(-1, height, -(-width // 8)), run_entries


@njit(cache=True)
def _fill(
    indptr,
    indices,
    row_class,
    row_ptr,
    run_ptr,
    n_units,
    unit_keys,
    height,
    width,
    run_keys,
    run_mask,
    run_entries,
):
    """Fill the runs in place; return the masks, uint8 [n_masks, height * ceil(width / 8)].

    A unit is what a run is filled with: a key of a slice, or the whole aligned block of a block tile, in which case
    `run_keys` [U, 1] takes the first key only.
    """
    units_per_run = width // unit_keys
    owner, seen, slot = (
        np.full(n_units, -1, np.int64),
        np.zeros(n_units, np.int64),
        np.zeros(n_units, np.int64),
    )
    touched = np.empty(n_units, np.int32)
    row_bytes = (width + 7) // 8
    mask_bytes = height * row_bytes
    bits, partial = np.zeros(mask_bytes, np.uint8), np.zeros(1, np.int64)
    masks, hashes = np.zeros((16, mask_bytes), np.uint8), np.zeros(16, np.uint64)
    table, n_masks = np.full(64, -1, np.int64), 0
    for b in range(len(row_ptr) - 1):
        lo, hi, first_run = row_ptr[b], row_ptr[b + 1], run_ptr[b]
        n_runs, n_touched, row = run_ptr[b + 1] - first_run, 0, lo
        while row < hi:
            last = _last_equal(row_class, row, hi)
            for e in range(indptr[row_class[row]], indptr[row_class[row] + 1]):
                unit = indices[e] // unit_keys
                if owner[unit] != b:
                    owner[unit], seen[unit] = b, 0
                    touched[n_touched] = unit
                    n_touched += 1
                seen[unit] += last - row
            row = last
        units = np.sort(touched[:n_touched])
        if unit_keys == 1:
            units = _full_first(units, seen, hi - lo)
        for i in range(n_touched):
            slot[units[i]] = i
            run_keys[first_run + i // units_per_run, i % units_per_run] = units[i] * unit_keys
            run_entries[first_run + i // units_per_run] += seen[units[i]]

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
        row = lo
        while row < hi:
            last = _last_equal(row_class, row, hi)
            for e in range(indptr[row_class[row]], indptr[row_class[row] + 1]):
                place = slot[indices[e] // unit_keys]
                mask = partial[place // units_per_run]
                if mask >= 0:
                    bit = place % units_per_run + indices[e] % unit_keys
                    for r in range(row - lo, last - lo):
                        bits[mask * mask_bytes + r * row_bytes + bit // 8] |= np.uint8(1 << (bit % 8))
            row = last

        # Equal masks are stored once: an open-addressing table of mask numbers, compared byte by byte.
        for r in range(n_runs):
            if partial[r] < 0:
                continue
            if n_masks == len(masks):
                masks, hashes = _grown(masks), _grown(hashes)
            if 2 * n_masks >= len(table):
                table = _rehash(hashes[:n_masks], 4 * len(table))
            mask = bits[partial[r] * mask_bytes : (partial[r] + 1) * mask_bytes]
            key = _hash(mask)
            place = key & np.uint64(len(table) - 1)
            while table[place] >= 0 and not (hashes[table[place]] == key and np.array_equal(masks[table[place]], mask)):
                place = (place + np.uint64(1)) & np.uint64(len(table) - 1)
            if table[place] < 0:
                table[place], hashes[n_masks] = n_masks, key
                masks[n_masks] = mask
                n_masks += 1
            run_mask[first_run + r] = table[place]
    return masks[:n_masks].copy()


@njit(cache=True)
def _last_equal(row_class, row, hi):
    """End of the sequence of rows equal to `row`, at most `hi`."""
    last = row + 1
    while last < hi and row_class[last] == row_class[row]:
        last += 1
    return last


@njit(cache=True)
def _full_first(keys, seen, rows):
    """`keys`, those that all `rows` see before the others, order kept otherwise."""
    out, n = np.empty_like(keys), 0
    for full in (True, False):
        for key in keys:
            if (seen[key] == rows) == full:
                out[n] = key
                n += 1
    return out


@njit(cache=True)
def _hash(data):
    """FNV-1a of bytes, folded so that the low bits depend on all."""
    value = np.uint64(14695981039346656037)
    for byte in data:
        value = (value ^ np.uint64(byte)) * np.uint64(1099511628211)
    return value ^ (value >> np.uint64(32))


@njit(cache=True)
def _rehash(hashes, size):
    table = np.full(size, -1, np.int64)
    for i in range(len(hashes)):
        place = hashes[i] & np.uint64(size - 1)
        while table[place] >= 0:
            place = (place + np.uint64(1)) & np.uint64(size - 1)
        table[place] = i
    return table


@njit(cache=True)
def _grown(array):
    out = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out
