"""What the masks of an order add to the steps of a GPU, told from a sample before anything is tiled (stage T2)."""

from typing import TYPE_CHECKING

import numpy as np

from tilewright.attention.cuda.mask_factors import factors
from tilewright.attention.cuda.tile_lists import RANKS

if TYPE_CHECKING:
    from tilewright.graph import Graph

# Groups whose masks are looked at, spread over the order.
SAMPLE = 16
# More than this many masked pairs say no more about a group.
_MOST_KEYS = 4096
# ASSUME: masks without factors, intervals or bytes, take as long as a product of this depth.
OTHERS_DEPTH = RANKS[-1]


def mask_cost(graph: "Graph", row_ptr: np.ndarray, head_dim: int) -> float:
    """How many times as much a step costs with the masks of the groups of rows `row_ptr` as without any.

    A step has two products of depth `head_dim`. Masks of rank R add one of depth R, others count as one of
    `OTHERS_DEPTH`. ASSUME: the costliest of a sample decides, since all masks of a launch have one form.
    """
    live = np.flatnonzero(np.diff(graph.indptr)[graph.row_id[row_ptr[:-1]]] > 0)
    chosen = live[np.unique(np.linspace(0, len(live) - 1, min(SAMPLE, len(live))).astype(int))] if len(live) else live
    return 1 + max((_depth(graph, *row_ptr[g : g + 2]) for g in chosen), default=0) / (2 * head_dim)


def _depth(graph, lo, hi):
    """Depth of the product that applies the mask of the rows lo..hi."""
    distinct = np.unique(graph.row_id[lo:hi])
    rows = [graph.indices[graph.indptr[r] : graph.indptr[r + 1]] for r in distinct]
    keys, count = np.unique(np.concatenate(rows), return_counts=True)
    keys = keys[count < len(rows)][:_MOST_KEYS]
    if not len(keys):
        return 0
    found = factors(~np.stack([np.isin(keys, row, assume_unique=True) for row in rows]), RANKS[-1])
    return OTHERS_DEPTH if found is None else next(rank for rank in RANKS if rank >= found[0].shape[1])
