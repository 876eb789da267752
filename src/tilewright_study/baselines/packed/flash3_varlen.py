"""FlashAttention-3's kernel for packed batches, made for Hopper GPUs.

Never run against the package itself, which is installed from source and not from the package index.
"""

import torch

from tilewright.core.errors import Unavailable
from tilewright.torch_attention import need_gpu
from tilewright_study.baselines.packed import Ready, lengths, rows


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package. ASSUME: version 3.0.0b1 of the interface."""
    need_gpu(packing.lists.device.type)
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable(f"FlashAttention-3 cannot be imported: {error}") from error
    if dtype == torch.float32:
        raise Unavailable(f"takes 16-bit types, found {dtype}")
    starts, longest = packing.starts, max(lengths(packing))

    def run(q, k, v):
        found = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest)
        # Earlier versions return the log-sum-exps as well.
        return found[0] if isinstance(found, tuple) else found

    return Ready(run, *rows(packing))
