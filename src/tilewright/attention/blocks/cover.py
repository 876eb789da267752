"""The cover of an ordered pattern: the key runs of every block and the bit masks that they share (stage T2).

Public entry is `blocks.extract`. A run is filled with units: with keys, one by one, in a slice, or with one aligned
block of keys in a block tile.
"""

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.blocks.cut import Windows, functions, kinds, plain, seen_units, taken, unions
from tilewright.attention.blocks.tiles import Tile, aligned_keys
from tilewright.graph import Graph, take_rows


def cover(
    graph: Graph, row_ptr: NDArray[np.int32], tile: Tile, windows: Windows | None = None
) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
    """``(run_ptr, run_keys, run_mask, masks, run_entries)`` of `blocks.Blocks` for blocks of rows `row_ptr`.

    windows: of the tile's units, read where they are counted already. Blocks of a kind have equal runs: the first of
    each is covered, which numbers the masks as if all were.
    """
    first, kind = kinds(graph, row_ptr)
    few, ptr = taken(graph, row_ptr, first)
    if fast := functions(few):
        n_units = windows.sizes(row_ptr)[first] if windows is not None and windows.kept else None
        run_ptr, *of_runs, masks = _compiled_cover(fast, few, ptr, tile, n_units)
    else:
        run_ptr, *of_runs, masks = _array_cover(few, ptr, tile)
    n_runs = np.diff(run_ptr)[kind]
    every = np.concatenate(([0], np.cumsum(n_runs)))
    if len(first) < len(kind):
        runs = np.arange(every[-1]) + np.repeat(run_ptr[kind] - every[:-1], n_runs)
        of_runs = [each[runs] for each in of_runs]
    keys, run_mask, run_entries = of_runs
    if not tile.gathered:
        keys = aligned_keys(keys, tile.run, graph.n_cols)
    return every, keys, run_mask, masks, run_entries


def _array_cover(graph, row_ptr, tile):
    """``(run_ptr, run_keys, run_mask, run_entries, masks)``, of a block tile the first key of each run alone."""
    unit_keys = 1 if tile.gathered else tile.keys
    n_units, units = -(-graph.n_cols // unit_keys), graph.indices // np.int32(unit_keys)
    known: dict[bytes, int] = {}
    parts = [
        _cover(graph, row_ptr[lo : hi + 1], tile, seen, known)
        for lo, hi, seen in seen_units(graph.indptr, units, graph.row_id, n_units, row_ptr)
    ]
    n_runs, keys, run_mask, run_entries = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    masks = np.frombuffer(b"".join(known), np.uint8).reshape(-1, tile.rows, -(-tile.run // 8)).copy()
    return np.concatenate(([0], np.cumsum(n_runs))), keys, run_mask, run_entries, masks


def _compiled_cover(fast, graph, row_ptr, tile, n_units=None):
    """As `_array_cover`, by the compiled functions `fast`. n_units: int64 [B], those of each block where known."""
    width, unit_keys = tile.run, 1 if tile.gathered else tile.keys
    per_run, row_ptr = width // unit_keys, plain(row_ptr, np.int64)
    if n_units is None:
        n_units = unions(graph, row_ptr, unit_keys, tile.gathered)
    run_ptr = np.concatenate(([0], np.cumsum(-(-n_units // per_run))))
    keys = np.full((run_ptr[-1], per_run), -1, np.int32)
    run_mask, run_entries = np.full(run_ptr[-1], -1, np.int32), np.zeros(run_ptr[-1], np.int32)
    arrays = plain(graph.indptr, np.int64), plain(graph.indices, np.int32), plain(graph.row_id, np.int32)
    sizes = -(-graph.n_cols // unit_keys), unit_keys.bit_length() - 1, tile.rows, width
    masks = fast.fill_runs(*arrays, row_ptr, run_ptr, *sizes, keys, run_mask, run_entries)
    return run_ptr, keys, run_mask, run_entries, masks.reshape(-1, tile.rows, -(-width // 8))


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
