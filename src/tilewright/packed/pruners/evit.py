"""EViT: in the blocks 3, 6 and 9, after the attention, the tokens that the class token attends to most stay; the
others are fused into one.

Source: Liang et al., "Not All Patches are What You Need" (ICLR 2022) and its code, with the fused token: the sum of the
inattentive tokens, weighted by the attention to them (mean over the heads, not normalised), counts as a token from then
on. Without fine-tuning its published weights are DeiT's own.
"""

import math
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from tilewright.packed.pruners import Choice, Settings, _scores

BLOCKS = (3, 6, 9)


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """keep_ratio: of the tokens but the class token, ``ceil`` of them stay at each pruning."""

    keep_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7


class Pruner(nn.Module):
    """See the module."""

    before, inside = (), BLOCKS

    def __init__(self, params: Params, width: int, n_tokens: int):
        """See the contract."""
        super().__init__()
        # Attentive tokens at each pruning, and all of the image's before it.
        self.counts, self.tokens = [], [n_tokens]
        for _ in BLOCKS:
            others = self.tokens[-1] - 1
            self.counts.append(math.ceil(params.keep_ratio * others))
            self.tokens.append(1 + self.counts[-1] + (self.counts[-1] < others))

    def forward(
        self, time: int, x: Tensor, layout: _scores.Layout, heads: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Choice]:
        """See the contract. The fused token stands where the best of the inattentive ones stood."""
        count, tokens = self.counts[time], self.tokens[time + 1]
        if count == self.tokens[time] - 1:
            return x, Choice(layout.valid, tokens, tokens)
        q, k, _ = heads
        attention = _scores.class_attention(q, k, layout).mean(1)
        # The class token stays anyway.
        order = _scores.best_first(
            attention.index_fill(1, attention.new_zeros(1, dtype=torch.int64), torch.inf), layout
        )
        keep = _scores.marked(order[:, : 1 + count], layout.length)
        weight = attention.masked_fill(keep, 0)
        fused = torch.bmm(weight[:, None], layout.padded(x).float())[:, 0].to(x.dtype)
        position = order[:, 1 + count]
        fused_at = _scores.marked(position[:, None], layout.length)
        return layout.put(x, position, fused), Choice(keep | fused_at, tokens, tokens, fused_at)
