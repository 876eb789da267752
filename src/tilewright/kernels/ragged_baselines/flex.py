"""FlexAttention, compiled: one sequence whose images do not see each other."""

import torch

from tilewright.kernels.baselines import flex
from tilewright.kernels.ragged_baselines import Ready, lengths


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    device = packing.lists.device.type
    counts = torch.tensor(lengths(packing), device=packing.lists.device)
    image = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    ready = flex.prepare(
        packing.graph(), max_bytes=0, device=device, mask_mod=lambda b, h, q, kv: image[q] == image[kv]
    )
    return Ready(
        ready.call,
        lambda *qkv: [x[: len(image)].transpose(0, 1)[None] for x in qkv],
        lambda out: out[0].transpose(0, 1),
    )
