"""The cover of an ordered pattern: the key runs of every block and the bit masks that they share (stage T2).

Public entry is `blocks.extract`. A run is filled with units: with keys, one by one, in a slice, or with one aligned
block of keys in a block tile.
"""

import numpy as np
from numpy.typing import NDArray

from tilewright.blocks.cut import functions, plain, seen_units
from tilewright.blocks.tiles import Tile, aligned_keys
from tilewright.graph import Graph, take_rows


def cover(graph: Graph, row_ptr: NDArray[np.int32], tile: Tile) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
    """``(run_ptr, run_keys, run_mask, masks, run_entries)`` of `blocks.Blocks` for blocks of rows `row_ptr`."""
    if fast := functions(graph):
        return _compiled_cover(fast, graph, row_ptr, tile)
    unit_keys = 1 if tile.gathered else tile.keys
    n_units, units = -(-graph.n_cols // unit_keys), graph.indices // np.int32(unit_keys)
    known: dict[bytes, int] = {}
    parts = [
        _cover(graph, row_ptr[lo : hi + 1], tile, seen, known)
        for lo, hi, seen in seen_units(graph.indptr, units, graph.row_id, n_units, row_ptr)
    ]
    n_runs, keys, run_mask, run_entries = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if not tile.gathered:
        keys = aligned_keys(keys, tile.run, graph.n_cols)
    masks = np.frombuffer(b"".join(known), np.uint8).reshape(-1, tile.rows, -(-tile.run // 8)).copy()
    return np.concatenate(([0], np.cumsum(n_runs))), keys, run_mask, masks, run_entries


def _compiled_cover(fast, graph, row_ptr, tile):
    """As `cover`, by the compiled functions `fast`."""
    unit_keys = 1 if tile.gathered else tile.keys
    n_units, width = -(-graph.n_cols // unit_keys), tile.run
    arrays = plain(graph.indptr, np.int64), plain(graph.indices, np.int32), plain(graph.row_id, np.int32)
    row_ptr = plain(row_ptr, np.int64)
    units = fast.unions(arrays[0], arrays[1] // np.int32(unit_keys), arrays[2], n_units, row_ptr)
    run_ptr = np.concatenate(([0], np.cumsum(-(-units // (width // unit_keys)))))
    keys = np.full((run_ptr[-1], width // unit_keys), -1, np.int32)
    run_mask, run_entries = np.full(run_ptr[-1], -1, np.int32), np.zeros(run_ptr[-1], np.int32)
    sizes = n_units, unit_keys, tile.rows, width
    masks = fast.fill_runs(*arrays, row_ptr, run_ptr, *sizes, keys, run_mask, run_entries)
    if not tile.gathered:
        keys = aligned_keys(keys, width, graph.n_cols)
    return run_ptr, keys, run_mask, masks.reshape(-1, tile.rows, -(-width // 8)), run_entries


def _cover(graph, row_ptr, tile, seen, known):
    """``(n_runs, run_keys, run_mask, run_entries)`` of the blocks of rows `row_ptr`; `run_keys` of a block tile [U, 1]
    hold the first keys alone. seen: csr [B, n_units], see `cut.seen_units`; known: as for `_masks`."""
    unit_keys = 1 if tile.gathered else tile.keys
    per_run, n_units, rows = tile.run // unit_keys, np.diff(seen.indptr), np.diff(row_ptr)
    run_ptr = np.concatenate(([0], np.cumsum(-(-n_units // per_run)))).astype(np.int64)
    block = np.repeat(np.arange(len(rows)), n_units)
    place = np.arange(len(block)) - seen.indptr[block]
    if tile.gathered:
        place = _full_first(seen.data == rows[block], seen.indptr, block)
    run = run_ptr[block] + place // per_run
    keys = np.full((run_ptr[-1], per_run), -1, np.int32)
    keys[run, place % per_run] = seen.indices * unit_keys
    run_entries = np.bincount(run, weights=seen.data, minlength=len(keys)).astype(np.int32)
    partial = run_entries < np.repeat(rows, np.diff(run_ptr)) * tile.run
    run_mask = np.full(len(keys), -1, np.int32)
    for b in np.unique(np.repeat(np.arange(len(rows)), np.diff(run_ptr))[partial]).tolist():
        units, runs = slice(*seen.indptr[b : b + 2]), slice(*run_ptr[b : b + 2])
        places = seen.indices[units], place[units] * unit_keys
        masks = _masks(graph, graph.row_id[row_ptr[b] : row_ptr[b + 1]], tile, places, partial[runs])
        # Equal masks are held once, numbered as they are met.
        run_mask[runs][partial[runs]] = [known.setdefault(mask.tobytes(), len(known)) for mask in masks]
    return np.diff(run_ptr), keys, run_mask, run_entries


def _full_first(full, indptr, block):
    """Places of the units of each block: those that all its rows see (`full`) before the others, each in order."""
    before = np.concatenate(([0], np.cumsum(full)))
    n_full = before[indptr[1:]] - before[indptr[:-1]]
    nth_full, nth = before[:-1] - before[indptr[block]], np.arange(len(full)) - indptr[block]
    return np.where(full, nth_full, n_full[block] + nth - nth_full)


def _masks(graph, row_id, tile, places, partial):
    """uint8 [n, M, ceil(W/8)]: the bit masks of those runs of one block that are `partial` (bool [its runs]).

    row_id: distinct row of each of its rows; places: its units, and where the keys of each begin among its runs.
    """
    unit_keys = 1 if tile.gathered else tile.keys
    distinct, row = np.unique(row_id, return_inverse=True)
    ptr, keys = take_rows(graph.indptr, graph.indices, distinct)
    column = places[1][np.searchsorted(places[0], keys // unit_keys)] + keys % unit_keys
    allowed = np.zeros((len(distinct), len(partial), tile.run), bool)
    allowed.reshape(len(distinct), -1)[np.repeat(np.arange(len(distinct)), np.diff(ptr)), column] = True
    masks = np.zeros((np.count_nonzero(partial), tile.rows, -(-tile.run // 8)), np.uint8)
    masks[:, : len(row)] = np.packbits(allowed[:, partial], axis=-1, bitorder="little")[row].transpose(1, 0, 2)
    return masks
