"""Images padded to the longest of them, and `scaled_dot_product_attention` with a mask."""

import torch
import torch.nn.functional as F

from tilewright.torch_attention import ALIGNED
from tilewright_study.baselines.packed import Ready, padded


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    put, get, own = padded(packing)
    images, n = own.shape
    wide = torch.full((images, -(-n // ALIGNED) * ALIGNED), -torch.inf, dtype=dtype, device=own.device)
    mask = wide[:, :n].masked_fill_(own, 0)[:, None, None].expand(images, heads, n, n)
    return Ready(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), put, get)
