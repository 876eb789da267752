"""The pattern as a dense additive mask of `scaled_dot_product_attention`."""

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.kernels.baselines import Ready, Unavailable

MASKED = True
DENSE = True


def prepare(graph, *, dtype, max_bytes):
    """Attention with a mask in `dtype` (a boolean one is converted in every call); see the contract of the package."""
    size = graph.n_rows * graph.n_cols * dtype.itemsize
    if size > max_bytes:
        raise Unavailable(f"the dense mask takes {size:,} bytes; at most {max_bytes:,} are allowed")
    distinct = torch.full((graph.n_classes, graph.n_cols), -torch.inf, dtype=dtype)
    owner = np.repeat(np.arange(graph.n_classes), np.diff(graph.indptr))
    distinct[torch.from_numpy(owner), torch.from_numpy(graph.indices.astype(np.int64))] = 0
    mask = distinct.index_select(0, torch.from_numpy(graph.row_class))
    return Ready(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), size, graph.n_rows * graph.n_cols
    )
