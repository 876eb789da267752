"""``torch.nn.attention.varlen``."""

import torch

from tilewright.kernels.baselines import backends, need_gpu
from tilewright.kernels.ragged_baselines import Ready, lengths, rows


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    from torch.nn.attention.varlen import varlen_attn

    starts = packing.starts
    need_gpu(starts.device.type)
    backends.need("flash", *(torch.empty(1, heads, 1, head_dim, dtype=dtype, device=starts.device) for _ in range(3)))
    longest = max(lengths(packing))
    return Ready(lambda q, k, v: varlen_attn(q, k, v, starts, starts, longest, longest), *rows(packing))
