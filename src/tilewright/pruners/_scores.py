"""What the pruners rank tokens by."""

import torch


def class_attention(q, k, layout):
    """Attention of the class token to each place, float32 [B, H, slots], zero where no token is.

    q, k: [..., H, D] as `layout` has the tokens.
    """
    scale = q.shape[-1] ** -0.5
    logits = torch.einsum("bhd,bnhd->bhn", layout.first(q).float() * scale, layout.padded(k).float())
    return logits.masked_fill(~layout.valid[:, None], -torch.inf).softmax(-1)


def best_first(score, layout):
    """Places int64 [B, slots] of the tokens with the largest score [B, slots] first, those without a token last."""
    return score.masked_fill(~layout.valid, -torch.inf).argsort(dim=1, descending=True, stable=True)


def marked(places, slots):
    """bool [B, slots], True at places [B, K]."""
    return torch.zeros(len(places), slots, dtype=torch.bool, device=places.device).scatter_(1, places, True)
