"""Attention to all keys, without the pattern and its bias: another network, what the paper calls dense.

Not the same logits: weights of a sparse network do not mean these. It says what the pattern saves.
"""

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch

    from tilewright.networks._sites import Site

TRACED = "everything"


def order(site: "Site"):
    """Tokens stay in the model's order."""
    return None


def prepare(site: "Site", bias, dtype: "torch.dtype", device: "torch.device | str"):
    """Torch's own attention, which no mask slows down."""
    return F.scaled_dot_product_attention


def taking(site: "Site", dtype: "torch.dtype", device: "torch.device | str"):
    """Likewise: a bias has no part in it."""
    return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v)
