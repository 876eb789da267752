"""Attention to all keys, without the pattern and its bias: another network, what the paper calls dense.

Not the same logits: weights of a sparse network do not mean these. It says what the pattern saves.
"""

import torch.nn.functional as F

TRACED = "everything"


def order(site):
    """Tokens stay in the model's order."""
    return None


def prepare(site, bias, dtype, device):
    """Torch's own attention, which no mask slows down."""
    return F.scaled_dot_product_attention


def taking(site, dtype, device):
    """Likewise: a bias has no part in it."""
    return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v)
