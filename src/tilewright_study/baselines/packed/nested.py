"""``torch.nested`` in its jagged layout, and `scaled_dot_product_attention`."""

import torch
import torch.nn.functional as F

from tilewright_study.baselines.packed import Ready, lengths


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    counts = lengths(packing)
    kept, bounds = sum(counts), {"min_seqlen": min(counts), "max_seqlen": max(counts)}
    offsets = packing.starts.long()

    def put(*qkv):
        # One offsets tensor: nested tensors of others are not known to have the same lengths. Strided ones are refused.
        made = (torch.nested.nested_tensor_from_jagged(x[:kept].contiguous(), offsets, **bounds) for x in qkv)
        return [x.transpose(1, 2) for x in made]

    return Ready(F.scaled_dot_product_attention, put, lambda out: out.transpose(1, 2).values())
