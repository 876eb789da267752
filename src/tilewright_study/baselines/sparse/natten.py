"""NATTEN's fused neighborhood attention, the kernel made for windows on a grid of tokens.

Its windows keep their size at the borders of the grid: they are shifted inwards, as those of the family `neighborhood`.
Those of a Vision Longformer are cut off: it is run only for patterns that are the same either way, and rows of others
say so whether or not the package is there.
"""

from importlib import import_module

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu

MASKED = True
DENSE = False
VARIANTS = ("natten",)

# Its arguments, by the parameters of the family `neighborhood`.
ARGUMENTS = {"kernel_size": "window", "stride": "stride", "dilation": "dilation", "is_causal": "causal"}


def prepare(graph, *, device, **_):
    """See the contract of the package: windows by ``na1d`` to ``na3d``, global keys as its additional ones, global
    queries densely.

    Never run against the package itself, which is installed from source. ASSUME: version 0.21 of the interface.
    """
    meta = graph.meta
    n_global, windows = meta.get("n_global", 0), _windows(graph)
    if graph.row_order is not None:
        raise Unavailable("takes the tokens of a grid row by row, in their natural order")
    need_gpu(device)
    grid = tuple(meta["grid"])
    try:
        attend = getattr(import_module("natten"), f"na{len(grid)}d")
    except ImportError as error:
        raise Unavailable(f"natten cannot be imported: {error}") from error

    def on_grid(x):
        return x[:, :, n_global:].transpose(1, 2).unflatten(1, grid)

    def run(q, k, v):
        extra = {}
        if n_global:
            keys, values = (x[:, :, :n_global].transpose(1, 2) for x in (k, v))
            extra = {"additional_keys": keys, "additional_values": values}
        out = attend(on_grid(q), on_grid(k), on_grid(v), **windows, **extra)
        out = out.flatten(1, len(grid)).transpose(1, 2)
        if not n_global:
            return out
        return torch.cat((F.scaled_dot_product_attention(q[:, :, :n_global], k, v), out), 2)

    return Ready(run, 0, graph.entries)


def _windows(graph):
    """NATTEN's arguments for the windows of a pattern. Raises `Unavailable` for what are none of its own."""
    meta, cut = graph.meta, 0
    if meta.get("family") == "neighborhood":
        params = meta["params"]
        cut = float(params["border"] == "cut")
        windows = {name: tuple(params[own]) for name, own in ARGUMENTS.items()}
    elif meta.get("family") == "vision_longformer" and meta["mode"] == "exact":
        kernel = 2 * (meta["window"] // 2) + 1
        # Of rows in any order: globals see all tokens, and count as whole.
        cut = np.mean(graph.row_degree < meta["n_global"] + kernel**2)
        windows = {"kernel_size": (kernel, kernel)}
    else:
        raise Unavailable("the pattern is not one of windows around each token of a grid")
    if cut:
        raise Unavailable(
            f"computes another pattern: its windows are shifted at the borders of the grid, where those of {cut:.0%} "
            f"of the queries are cut off"
        )
    if min(windows["kernel_size"]) < 2:
        raise Unavailable("takes windows of 2 tokens or more along each axis")
    return windows
