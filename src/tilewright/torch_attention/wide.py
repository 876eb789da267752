"""The rows that see most keys, attended apart from the others.

A block-sparse kernel that cannot split a row makes its whole block of rows visit every key, one after the other; dense
attention of a few rows splits the keys.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from tilewright import devices
from tilewright.core.errors import Unavailable
from tilewright.graph import take_rows
from tilewright.torch_attention import ALIGNED

if TYPE_CHECKING:
    from tilewright.graph import Graph

# A row that sees more than this share of the keys is wide.
SHARE = 0.5


def split(graph: "Graph") -> "tuple[Graph, np.ndarray]":
    """``(graph, rows)``: the graph without the pairs of its wide rows, and which these are. Raises `Unavailable`."""
    degree = np.diff(graph.indptr)
    wide = degree > SHARE * graph.n_cols
    if not wide.any() or wide.all():
        raise Unavailable(f"{'every' if wide.any() else 'no'} query sees more than {SHARE:.0%} of the keys")
    # The rows stay, without pairs of their own; what a kernel makes of them is overwritten.
    narrow = replace(
        graph,
        indptr=np.concatenate(([0], np.cumsum(np.where(wide, 0, degree)))),
        indices=graph.indices[np.repeat(~wide, degree)],
    )
    return narrow, np.flatnonzero(wide[graph.row_id])


def attending(graph: Any, rows: Any, dtype: torch.dtype, device: Any, bias: Any = None) -> Callable:
    """``run(out, q, k, v) -> out``: `rows` of `out` written by dense attention. bias: a `flex.Bias`."""
    places = torch.from_numpy(rows).to(device)
    mask = None
    if bias is not None or np.diff(graph.indptr)[graph.row_id[rows]].min() < graph.n_cols:
        heads = 1 if bias is None else len(bias.table)
        # A GPU's kernels copy, in each call, what is not aligned.
        width = -(-graph.n_cols // ALIGNED) * ALIGNED if devices.facts(device).CUDA else graph.n_cols
        indptr, keys = take_rows(graph.indptr, graph.indices, graph.row_id[rows])
        at = torch.from_numpy(np.repeat(np.arange(len(rows)), np.diff(indptr))).to(device)
        columns = torch.from_numpy(keys.astype(np.int64)).to(device)
        mask = torch.full((heads, len(rows), width), -torch.inf, dtype=dtype, device=device)
        mask[:, at, columns] = 0 if bias is None else bias.table[:, bias.index(places[at], columns)].to(dtype)
        mask = mask[None, :, :, : graph.n_cols]

    def run(out, q, k, v):
        wide = F.scaled_dot_product_attention(q.index_select(2, places), k, v, attn_mask=mask)
        return out.index_copy_(2, places, wide)

    return run
