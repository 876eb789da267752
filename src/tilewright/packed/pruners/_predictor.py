"""The predictor that DynamicViT learns: scores of patches, from which its prunings choose.

Source: Rao et al., "DynamicViT" (2021), and its code.
"""

import torch
from torch import Tensor, nn

from tilewright.core import precision


class Predictor(nn.Module):
    """Scores patches from half of their own channels and the mean of the other half over the patches that count."""

    def __init__(self, width: int):
        """width: channels of a patch."""
        super().__init__()
        self.in_conv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.out_conv = nn.Sequential(
            nn.Linear(width, width // 2),
            nn.GELU(),
            nn.Linear(width // 2, width // 4),
            nn.GELU(),
            nn.Linear(width // 4, 2),
        )

    def forward(self, x: Tensor, alive: Tensor) -> Tensor:
        """Log-odds of staying [B, n] of patches x [B, n, C], of which those in alive [B, n] count.

        The published score is the logarithm of the probability. It ranks patches in the same order. But where they
        hardly differ, near log 0.5, it rounds a thousand times coarser, and rounding would choose among them.
        """
        own, shared = precision.in_float32(self.in_conv, x).chunk(2, dim=-1)
        counts = alive[:, :, None].float()
        mean = (shared * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
        stay, go = precision.in_float32(self.out_conv, torch.cat((own, mean.expand_as(shared)), dim=-1)).unbind(-1)
        return stay - go
