"""ATS, adaptive token sampling: in the blocks 3 to 11, after the attention, tokens are sampled by their significance.

Source: Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers" (ECCV 2022) and its code, which takes
DeiT's own weights. The significance of a token is the attention of the class token to it, summed over the heads, times
the norm of its value, over the sum of these; the cumulative distribution of the sorted scores is inverted at a fixed
grid. Tokens that are hit, once or more, stay, so that each image keeps its own number. Only queries are sampled: tokens
that are dropped are still keys and values of that block's attention, which is why they may be dropped after it.
"""

from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from tilewright.packed.pruners import Choice, Settings, _scores

BLOCKS = tuple(range(3, 12))
# As the code has it, fewer tokens are never sampled.
FEWEST = 8


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """keep_ratio: points of the grid over the network's tokens; 1 as published, and the most that stay."""

    keep_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class Pruner(nn.Module):
    """See the module."""

    before, inside = (), BLOCKS

    def __init__(self, params: Params, width: int, n_tokens: int):
        """See the contract."""
        super().__init__()
        self.most = min(n_tokens, max(FEWEST, round(params.keep_ratio * n_tokens)))

    def forward(
        self, time: int, x: Tensor, layout: _scores.Layout, heads: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Choice]:
        """See the contract."""
        q, k, v = heads
        attention = _scores.class_attention(q, k, layout).sum(1)
        score = (attention * layout.padded(v.flatten(-2).float().norm(dim=-1)))[:, 1:]
        keep = sample(score, layout.valid[:, 1:], self.most - 1)
        keep = torch.cat((torch.ones_like(keep[:, :1]), keep), dim=1)
        return x, Choice(keep, 1, min(self.most, layout.length))


def sample(score: Tensor, valid: Tensor, points: int) -> Tensor:
    """bool [B, n]: the tokens that a grid of `points` hits, of those in valid [B, n]; score [B, n], not negative.

    An image of a single token keeps it.
    """
    # ASSUME: each image is sampled as the published code samples it alone. In a batch its padding has a score of zero,
    # and takes part in the distribution.
    order = score.masked_fill(~valid, -1).argsort(dim=1, stable=True)
    missing = (~valid).sum(1, keepdim=True)
    share = score.masked_fill(~valid, 0).gather(1, order).double()
    share = share / share.sum(1, keepdim=True)
    cdf = share.cumsum(1)
    # The distribution from 0 at the least significant token to 1; padding, in front, lies below.
    first = cdf.gather(1, missing.clamp(max=score.shape[1] - 1))
    cdf = (cdf - first) / (cdf[:, -1:] - first)
    rank = torch.arange(score.shape[1], device=score.device)
    cdf = cdf.masked_fill(rank < missing, -torch.inf)
    # The grid begins at the least value above 0 and ends at 1.
    start = cdf.masked_fill(cdf <= 0, torch.inf).amin(1, keepdim=True)
    grid = start + (1 - start) * torch.linspace(0, 1, points, dtype=cdf.dtype, device=cdf.device)
    above = torch.searchsorted(cdf, grid).clamp_(max=score.shape[1] - 1)
    below = (above - 1).clamp_(min=0)
    nearer = grid - cdf.gather(1, below) <= cdf.gather(1, above) - grid
    hit = torch.where(nearer, below, above)
    sampled = _scores.marked(order.gather(1, hit), score.shape[1])
    return valid & (sampled | (valid.sum(1, keepdim=True) == 1))
