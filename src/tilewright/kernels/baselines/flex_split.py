"""FlexAttention without the rows that see most keys, and these by themselves.

A row that sees everything is one long program of FlexAttention, which has no way to split it, and makes its whole block
of rows visit every key. Dense attention of a few rows splits the keys.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.graph import take_rows
from tilewright.kernels.baselines import Ready, Unavailable, flex

MASKED = True
DENSE = False
VARIANTS = ("128", "64")

# A row that sees more than this share of the keys is taken out.
SHARE = 0.5


def prepare(graph, *, dtype, device, max_bytes, variant, **_):
    """See the contract of the package."""
    degree = np.diff(graph.indptr)
    wide = degree > SHARE * graph.n_cols
    if not wide.any() or wide.all():
        raise Unavailable(f"{'every' if wide.any() else 'no'} query sees more than {SHARE:.0%} of the keys")
    # The rows stay, without pairs of their own; what FlexAttention makes of them is overwritten.
    narrow = replace(
        graph,
        indptr=np.concatenate(([0], np.cumsum(np.where(wide, 0, degree)))),
        indices=graph.indices[np.repeat(~wide, degree)],
    )
    mask_mod, size = flex.pairs(graph, max_bytes, device)
    local = flex.prepare(narrow, max_bytes=max_bytes, device=device, variant=variant, mask_mod=mask_mod)
    rows = np.flatnonzero(wide[graph.row_class])
    mask = None
    if degree[wide].min() < graph.n_cols:
        indptr, keys = take_rows(graph.indptr, graph.indices, graph.row_class[rows])
        mask = torch.full((len(rows), graph.n_cols), -torch.inf, dtype=dtype)
        mask[np.repeat(np.arange(len(rows)), np.diff(indptr)), keys.astype(np.int64)] = 0
        mask = mask.to(device)
    places = torch.from_numpy(rows).to(device)

    def run(q, k, v):
        out = local.call(q, k, v)
        return out.index_copy_(
            2, places, F.scaled_dot_product_attention(q.index_select(2, places), k, v, attn_mask=mask)
        )

    return Ready(run, size + local.held_bytes, local.executed + len(rows) * graph.n_cols)
