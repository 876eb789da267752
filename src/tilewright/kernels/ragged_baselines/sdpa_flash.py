"""Images padded to the longest of them, and FlashAttention-2 as torch has it, which takes no mask."""

import torch

from tilewright.kernels.baselines import backends, need_gpu
from tilewright.kernels.ragged_baselines import Ready, padded


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package. Where lengths differ it attends padding too: a bound, not the same result."""
    need_gpu(packing.lists.device.type)
    put, get, own = padded(packing)
    backends.need("flash", *(torch.empty(1, heads, 1, head_dim, dtype=dtype, device=own.device) for _ in range(3)))
    return Ready(lambda q, k, v: backends.attend("flash", q, k, v)[0], put, get, exact=bool(own.all()))
