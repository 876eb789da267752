"""The lists of a backward: a plan's pattern, and its transpose, cut anew for `backward_kernels` (training).

Blocks cover the queries of a plan. Its keys get blocks of their own: the transposed pattern, in the plan's order, is
cut by the same functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy.sparse import csr_array

from tilewright import graph
from tilewright.attention import blocks
from tilewright.attention.blocks import Blocks, work
from tilewright.attention.blocks.tiles import Tile, fitting, parse
from tilewright.attention.cuda import tile_lists
from tilewright.core.compiled import njit
from tilewright.devices.cuda import facts

# Tiles that regions choose from.
TILES = "64x1", "16x1"
# What a pair costs in a tile of 16 rows, in pairs of one with 64. ASSUME: tensor cores take a quarter of the rows at a
# time, and steps have as many keys to load.
SMALL_ROWS, SMALL_COST = 16, 2.5
# Where a smaller share of the runs is full, all steps of a launch have masks. ASSUME: one loop over all steps is faster
# then than two, one without masks: each fills its pipeline anew, and of two that share accumulators the assembler lets
# no products overlap.
MOST_FULL = 0.5


def transposed(used: Sequence[tuple[Blocks, np.ndarray]], shape: tuple[int, ...]) -> csr_array:
    """The transpose of the pattern that the blocks cover, in the plan's order, as a boolean ``csr_array`` [N_k, N_q].

    used: ``[(blocks, int ids), …]``, ids ascending.
    """
    counts = np.zeros(shape[1], np.int64)
    for cover, ids in used:
        _take(cover.row_ptr, cover.run_ptr, cover.run_keys, cover.run_mask, cover.masks, ids, counts, None)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices, place = np.empty(indptr[-1], np.int32), indptr[:-1].copy()
    for cover, ids in used:
        _take(cover.row_ptr, cover.run_ptr, cover.run_keys, cover.run_mask, cover.masks, ids, place, indices)
    return csr_array((np.ones(len(indices), bool), indices, indptr), shape=shape[::-1])


@njit(cache=True, nogil=True)
def _take(row_ptr, run_ptr, run_keys, run_mask, masks, ids, place, indices):
    """Add the pairs of the blocks `ids` to `place`, how many each key has; write their rows to `indices`, if given,
    where a key's `place` was."""
    for b in ids:
        first, n_rows = row_ptr[b], row_ptr[b + 1] - row_ptr[b]
        for run in range(run_ptr[b], run_ptr[b + 1]):
            mask = run_mask[run]
            for row in range(n_rows):
                for i in range(run_keys.shape[1]):
                    # Padded keys and rows have no bits; a full run has no padded keys.
                    if mask < 0 or masks[mask, row, i >> 3] >> (i & 7) & 1:
                        key = run_keys[run, i]
                        if indices is not None:
                            indices[place[key]] = first + row
                        place[key] += 1


def as_graph(found: csr_array, patterns: int = 1) -> graph.Graph:
    """The `Graph` of a boolean sparse array whose rows are to be cut: of several patterns, one above the other."""
    found = found.tocsr()
    found.sort_indices()
    meta = {} if patterns == 1 else {graph.STACKED: patterns}
    return graph.from_csr(found.indptr, found.indices, found.shape, meta=meta)


def build(
    pattern: graph.Graph,
    step_keys: Callable[[Tile], int],
    index: Callable | None = None,
    arranged: Callable | None = None,
) -> list[tuple[Tile, tile_lists.TileLists]]:
    """``[(tile, TileLists), …]`` that cover the rows of `pattern`, a `Graph`; each region has the cheapest tile.

    step_keys: ``callable(tile) -> int``. index: as for `tile_lists.build`.
    arranged: ``callable(build, cover, columns) -> TileLists``, see `executor.lists_of`; None for one pattern.
    """
    chosen = [parse(name) for name in fitting(TILES, pattern.shape, facts.FEWEST_ROWS)]
    covers = list(blocks.extract_all(pattern, chosen).values())
    cost = np.stack([_cost(cover) for cover in covers])
    best, found = cost.argmin(0), []
    for number, cover in enumerate(covers):
        items = work.items(cover, facts.SPLIT_KEYS)
        here = best[cover.region[items.block]] == number
        if not here.any():
            continue
        columns = [column[here] for column in (items.block, items.run_lo, items.run_hi)]
        made = partial(tile_lists.build, step_keys=step_keys(cover.tile), index=index)
        masked = _masked(cover, *columns[1:])  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
        found.append((cover.tile, made(masked, *columns) if arranged is None else arranged(made, masked, columns)))
    return found


def _masked(cover, run_lo, run_hi):
    """`cover` with masks for all runs, where few of these items have none."""
    first = np.concatenate(([0], np.cumsum(cover.run_mask < 0)))
    share = (first[run_hi] - first[run_lo]).sum() / (run_hi - run_lo).sum()
    if cover.tile.rows > SMALL_ROWS and 0 < share < MOST_FULL:
        # A mask that allows all pairs, in place of none.
        everything = np.full((1, *cover.masks.shape[1:]), 255, np.uint8)
        masks = np.concatenate((cover.masks, everything))
        run_mask = np.where(cover.run_mask < 0, len(cover.masks), cover.run_mask).astype(np.int32)
        cover = replace(cover, masks=masks, run_mask=run_mask)
    return cover


def _cost(cover):
    """float [regions]: what each costs in this tile, in pairs of a large one."""
    factor = SMALL_COST if cover.tile.rows <= SMALL_ROWS else 1.0
    return np.bincount(cover.region, weights=cover.area, minlength=cover.n_regions) * factor
