"""What the masks of an order add to the steps of a GPU, told from a sample before anything is tiled (stage T2)."""

import numpy as np

from tilewright.targets.cuda.mask_factors import factors
from tilewright.targets.cuda.mask_intervals import intervals
from tilewright.targets.cuda.tile_lists import MOST_STEPS, RANKS

# Groups whose masks are looked at, spread over the order.
SAMPLE = 16
# More than this many masked pairs say no more about a group.
_MOST_KEYS = 4096
# Keys of a step in which intervals are looked for.
_STEP_KEYS = 64
# ASSUME: to compare the keys of a step with intervals takes as long as a product of this depth (decision 0029).
INTERVALS_DEPTH = RANKS[-1]


def mask_cost(graph, row_ptr, head_dim):
    """How many times as much a step costs with the masks of the groups of rows `row_ptr` as without any.

    A step has two products of depth `head_dim`. Masks of rank R add one of depth R, intervals count as one of
    `INTERVALS_DEPTH`. Other masks are read: for each key as many values as the group has rows, beside `head_dim` values
    of the key and as many of its value. ASSUME: the costliest of a sample decides, since all masks of a launch have one
    form.
    """
    live = np.flatnonzero(np.diff(graph.indptr)[graph.row_id[row_ptr[:-1]]] > 0)
    chosen = live[np.unique(np.linspace(0, len(live) - 1, min(SAMPLE, len(live))).astype(int))] if len(live) else live
    masks = [_allowed(graph, *row_ptr[g : g + 2]) for g in chosen]
    return 1 + _depth(masks, np.diff(row_ptr)[chosen]) / (2 * head_dim)


def _depth(masks, rows):
    """Depth of the product that applies the `masks` (bool [distinct rows, keys]) of groups of so many `rows`."""
    found = [factors(~allowed, RANKS[-1]) if allowed.size else () for allowed in masks]
    if None not in found:
        return max((next(rank for rank in RANKS if rank >= pair[0].shape[1]) for pair in found if pair), default=0)
    least = sum(-(-allowed.shape[1] // _STEP_KEYS) for allowed in masks)
    for allowed in masks:
        placed = intervals(allowed, _STEP_KEYS, int(MOST_STEPS * least))
        if placed is None:
            return max(n for n, pair in zip(rows.tolist(), found, strict=True) if pair is None)
        least -= len(placed[0]) / MOST_STEPS
    return INTERVALS_DEPTH


def _allowed(graph, lo, hi):
    """bool [distinct rows, keys]: who of the rows lo..hi sees which of the keys that not all of them see."""
    ids = graph.row_id[lo:hi]
    _, first = np.unique(ids, return_index=True)
    rows = [graph.indices[graph.indptr[r] : graph.indptr[r + 1]] for r in ids[np.sort(first)]]
    keys, count = np.unique(np.concatenate(rows), return_counts=True)
    keys = keys[count < len(rows)][:_MOST_KEYS]
    return np.stack([np.isin(keys, row, assume_unique=True) for row in rows])
