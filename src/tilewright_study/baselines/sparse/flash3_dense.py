"""Dense attention over all pairs by FlashAttention-3, made for Hopper GPUs.

Never run against the package itself, which is installed from source and not from the package index.
"""

import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, need_gpu

MASKED = False
DENSE = True
VARIANTS = ("hopper",)


def prepare(graph, *, dtype, device, **_):
    """See the contract of the package. ASSUME: version 3.0.0b1 of the interface."""
    need_gpu(device)
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError as error:
        raise Unavailable(f"FlashAttention-3 cannot be imported: {error}") from error
    if dtype == torch.float32:
        raise Unavailable(f"takes 16-bit types, found {dtype}")

    def run(q, k, v):
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))
        # Earlier versions return the log-sum-exps as well.
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return Ready(run, 0, graph.n_rows * graph.n_cols)
