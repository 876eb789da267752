"""Masked scaled-dot-product attention over all keys, some queries at a time: the oracle of the networks."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from tilewright import devices
from tilewright.core import _internals

if TYPE_CHECKING:
    from tilewright.networks.attention_sites import Site

# Gradients pass through torch's own operators.
TRACED = None

# A mask no larger than this is kept, else it is made some rows at a time in every call. A GPU waits long for each of
# them and has its memory for it: there it is a share of what is free.
MASK_BYTES = 1 << 29
MASK_SHARE = 1 / 4
# In one call; kernels count a mask's entries in 32 bits.
MASK_ENTRIES = (1 << 31) - 1


def order(site: "Site") -> None:
    """Tokens stay in the model's order."""
    return None


def prepare(site: "Site", bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> Callable:
    """Rows of the mask, bias included, are made as they are needed, so that any image size fits the memory."""
    graph = site.graph
    heads = 1 if bias is None else len(bias)
    gpu = devices.facts(device.type).CUDA
    kept_bytes = int(MASK_SHARE * torch.cuda.mem_get_info(device)[0]) if gpu else MASK_BYTES
    row = heads * graph.n_cols
    step = max(1, min(kept_bytes // dtype.itemsize, MASK_ENTRIES) // row)
    keeps = graph.n_rows * row * dtype.itemsize <= kept_bytes
    bounds = [(lo, min(lo + step, graph.n_rows)) for lo in range(0, graph.n_rows, step)]
    kept: dict = {}

    def mask(lo, hi):
        if lo in kept:
            return kept[lo]
        made = _mask(site, bias, lo, hi, dtype, device)
        if keeps:
            kept[lo] = made
        return made

    def run(q, k, v):
        parts = [F.scaled_dot_product_attention(q[:, :, lo:hi], k, v, attn_mask=mask(lo, hi)) for lo, hi in bounds]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    return run


def taking(site: "Site", dtype: torch.dtype, device: torch.device) -> Callable:
    """The mask is made in every call, and gradients pass through it."""

    @_internals.uncompiled
    def run(q, k, v, bias):
        return prepare(site, bias, dtype, device)(q, k, v)

    return run


def _mask(site, bias, lo, hi, dtype, device):
    """Additive mask [H or 1, hi - lo, N_k] of some rows: the bias (or 0) where the pattern is, else minus infinity."""
    graph = site.graph
    of_row = graph.row_id[lo:hi]
    counts = np.diff(graph.indptr)[of_row]
    starts = graph.indptr[of_row]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = torch.from_numpy(np.repeat(np.arange(hi - lo), counts))
    cols = torch.from_numpy(graph.indices[np.repeat(starts, counts) + within].astype(np.int64))
    heads = 1 if bias is None else len(bias)
    mask = torch.full((heads, hi - lo, graph.n_cols), -torch.inf, dtype=dtype, device=device)
    rows, cols = rows.to(device), cols.to(device)
    mask[:, rows, cols] = 0 if bias is None else bias[:, site.bias_index(rows + lo, cols)].to(dtype)
    return mask
