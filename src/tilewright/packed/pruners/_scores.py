"""What the pruners rank tokens by."""

import torch


def class_attention(q: torch.Tensor, k: torch.Tensor, layout) -> torch.Tensor:
    """Attention of the class token to each position, float32 [B, H, L], zero where no token is.

    q, k: [..., H, D] as `layout` has the tokens.
    """
    scale = q.shape[-1] ** -0.5
    logits = torch.einsum("bhd,bnhd->bhn", layout.first(q).float() * scale, layout.padded(k).float())
    return logits.masked_fill(~layout.valid[:, None], -torch.inf).softmax(-1)


def best_first(score: torch.Tensor, layout) -> torch.Tensor:
    """Positions int64 [B, L] of the tokens with the largest score [B, L] first, those without a token last."""
    return score.masked_fill(~layout.valid, -torch.inf).argsort(dim=1, descending=True, stable=True)


def marked(positions: torch.Tensor, length: int) -> torch.Tensor:
    """bool [B, L], True at positions [B, K]."""
    # A number: torch.jit knows no form for a boolean.
    return torch.zeros(len(positions), length, dtype=torch.bool, device=positions.device).scatter_(1, positions, 1)
