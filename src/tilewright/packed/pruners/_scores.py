"""What the pruners rank tokens by."""

from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """How the tokens of a batch lie, see `tilewright.networks._layouts`. valid: bool [B, length]."""

    valid: Tensor
    length: int

    def padded(self, x: Tensor) -> Tensor:
        """Tokens by image and position."""

    def first(self, x: Tensor) -> Tensor:
        """The first token of each image."""

    def put(self, x: Tensor, position: Tensor, y: Tensor) -> Tensor:
        """x with the tokens y at a position of each image."""


def class_attention(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """Attention of the class token to each position, float32 [B, H, L], zero where no token is.

    q, k: [..., H, D] as `layout` has the tokens.
    """
    scale = q.shape[-1] ** -0.5
    logits = torch.einsum("bhd,bnhd->bhn", layout.first(q).float() * scale, layout.padded(k).float())
    return logits.masked_fill(~layout.valid[:, None], -torch.inf).softmax(-1)


def best_first(score: Tensor, layout: Layout) -> Tensor:
    """Positions int64 [B, L] of the tokens with the largest score [B, L] first, those without a token last."""
    return score.masked_fill(~layout.valid, -torch.inf).argsort(dim=1, descending=True, stable=True)


def marked(positions: Tensor, length: int) -> Tensor:
    """bool [B, L], True at positions [B, K]."""
    if positions.shape[1] == 1:
        # The compiler of torch 2.11 makes int64 of one number that is scattered into a constant.
        return torch.arange(length, device=positions.device) == positions
    # A number: torch.jit knows no form for a boolean.
    return torch.zeros(len(positions), length, dtype=torch.bool, device=positions.device).scatter_(1, positions, 1)
