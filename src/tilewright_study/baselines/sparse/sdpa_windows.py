"""Disjoint windows of equal size as a batch of dense attention: tokens gathered, attended and put back."""

import numpy as np
import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, kernels, need_gpu, patterns

MASKED = True
DENSE = False
VARIANTS = kernels.NAMES


def prepare(graph, *, batch, heads, head_dim, dtype, device, variant, **_):
    """See the contract of the package. Tokens that already stand window by window are not gathered."""
    need_gpu(device)
    owner = patterns.windows(graph)
    if owner is None:
        raise Unavailable("the pattern is not one of disjoint windows of equal size")
    count = graph.n_distinct
    rows, keys = (np.argsort(window, kind="stable") for window in (graph.row_id, owner))
    taken, read, back = (_moved(order, device) for order in (rows, keys, np.argsort(rows)))
    sizes = graph.n_rows // count, graph.n_cols // count, graph.n_cols // count
    tokens = (torch.empty(batch * count, heads, n, head_dim, dtype=dtype, device=device) for n in sizes)
    kernels.need(variant, *tokens)

    def windows(x, order):
        """Tokens [B, H, N, D] as [B * windows, H, N / windows, D]; for a batch of one without another copy."""
        return _take(x, order).unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)

    def run(q, k, v):
        out, _ = kernels.attend(variant, windows(q, taken), windows(k, read), windows(v, read))
        return _take(out.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3), back)

    return Ready(run, 8 * (2 * graph.n_rows + graph.n_cols), graph.n_rows * graph.n_cols // count)


def _moved(order, device):
    """The order as a tensor, None where nothing moves."""
    return None if (order == np.arange(len(order))).all() else torch.from_numpy(order).to(device)


def _take(x, order):
    return x if order is None else x.index_select(2, order)
