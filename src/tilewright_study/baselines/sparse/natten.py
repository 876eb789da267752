"""NATTEN's fused neighborhood attention, the kernel made for square windows on a grid of tokens.

Its windows keep their size at the borders of the grid: they are shifted inwards, where those of a Vision Longformer are
cut off. It is run only for patterns that are the same either way: of the study's workloads none is, and their rows say
so whether or not the package is there.
"""

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu

MASKED = True
DENSE = False
VARIANTS = ("na2d",)


def prepare(graph, *, device, **_):
    """See the contract of the package: windows by ``na2d``, global keys as its additional ones, global queries densely.

    Never run against the package itself, which is installed from source. ASSUME: version 0.21 of the interface.
    """
    meta = graph.meta
    if meta.get("family") != "vision_longformer" or meta["mode"] != "exact":
        raise Unavailable("the pattern is not one of square windows around each token")
    grid, n_global, kernel = tuple(meta["grid"]), meta["n_global"], 2 * (meta["window"] // 2) + 1
    # Of rows in any order: globals see all tokens, and count as whole.
    if cut := np.mean(graph.row_degree < n_global + kernel**2):
        raise Unavailable(
            f"computes another pattern: its windows are shifted at the borders of the grid, where those of {cut:.0%} "
            f"of the queries are cut off"
        )
    if graph.row_order is not None:
        raise Unavailable("takes the tokens of a grid row by row, in their natural order")
    need_gpu(device)
    try:
        from natten import na2d
    except ImportError as error:
        raise Unavailable(f"natten cannot be imported: {error}") from error

    def on_grid(x):
        return x[:, :, n_global:].transpose(1, 2).unflatten(1, grid)

    def run(q, k, v):
        extra = {}
        if n_global:
            keys, values = (x[:, :, :n_global].transpose(1, 2) for x in (k, v))
            extra = {"additional_keys": keys, "additional_values": values}
        out = na2d(on_grid(q), on_grid(k), on_grid(v), kernel_size=(kernel, kernel), **extra)
        wide = F.scaled_dot_product_attention(q[:, :, :n_global], k, v)
        return torch.cat((wide, out.flatten(1, 2).transpose(1, 2)), 2)

    return Ready(run, 0, graph.entries)
