"""Attention to all keys, without the pattern and its bias: another network, what the paper calls dense.

Not the same logits: weights of a sparse network do not mean these. It says what the pattern saves.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch

    from tilewright.networks.attention_sites import Site

TRACED = "everything"


def order(site: "Site") -> None:
    """Tokens stay in the model's order."""
    return None


def prepare(site: "Site", bias: "torch.Tensor | None", dtype: "torch.dtype", device: "torch.device | str") -> Callable:
    """Torch's own attention, which no mask slows down."""
    return F.scaled_dot_product_attention


def taking(site: "Site", dtype: "torch.dtype", device: "torch.device | str") -> Callable:
    """Likewise: a bias has no part in it."""
    return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v)
