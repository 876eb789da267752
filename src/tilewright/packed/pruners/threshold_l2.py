"""Threshold-L2: once, after the fourth block, the tokens of the largest norm are kept.

Source: "Dispatch-Aware Ragged Attention for Pruned Vision Transformers" (arXiv 2604.15408), which keeps the best
``floor(N (1 - rho))`` of all N tokens, at least one, for a fixed rho or one that is drawn for each image, and then the
class token in any case.
"""

from functools import cache
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from tilewright.core import _internals
from tilewright.core.errors import ConfigError
from tilewright.packed.pruners import Choice, Settings, _scores

AFTER = 4
# The published rho of most tables.
RATIO = 0.5
# Drawn ratios are those of this seed, image by image, so that all batchings prune the same tokens.
SEED = 0

Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """At most one of: keep_ratio, 1 - rho, the share of tokens that is kept; keep_range, the least and the greatest
    share, drawn uniformly for each image; threshold, the norm over the image's mean norm from which a token is kept."""

    keep_ratio: Ratio | None = None
    keep_range: tuple[Ratio, Ratio] | None = None
    threshold: Annotated[float, msgspec.Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        stated = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(stated) > 1:
            raise ConfigError(f"pruner threshold_l2: expected one of {', '.join(stated)}, found {len(stated)}")
        if self.keep_range and self.keep_range[0] > self.keep_range[1]:
            raise ConfigError(f"keep_range: expected the least share first, found {self.keep_range}")


class Pruner(nn.Module):
    """See the module."""

    before, inside = (AFTER,), ()

    def __init__(self, params: Params, width: int, n_tokens: int):
        """See the contract."""
        super().__init__()
        self.params, self.n_tokens = params, n_tokens

    def forward(self, time: int, x: Tensor, layout: _scores.Layout, heads: int) -> tuple[Tensor, Choice]:
        """See the contract; it prunes once, where all images have all of their tokens."""
        norm = layout.padded(x).float().norm(dim=-1)
        n = self.n_tokens
        if self.params.threshold is not None:
            # ASSUME: the published name promises a threshold, the published code has none. The scale of a norm differs
            # from network to network; of the image's mean, 1 keeps about half in all of them.
            keep = norm >= self.params.threshold * norm.mean(1, keepdim=True)
            least, most = 1, n
        else:
            low, high = self.params.keep_range or 2 * (self.params.keep_ratio or RATIO,)
            least, most = (max(1, int(n * ratio)) for ratio in (low, high))
            ranks = norm.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            keep = ranks < (most if least == most else counts(len(x), n, low, high, x.device)[:, None])
            # The class token comes on top, unless it is among the best.
            most = min(most + 1, n)
        keep[:, 0] = True
        return x, Choice(keep, least, most)


@_internals.constant
def counts(*drawn: float | torch.device) -> Tensor:
    """`_counts`, whose generator ``torch.compile`` cannot follow."""
    return _counts(*drawn)


@cache
def _counts(n_batch, n_tokens, low, high, device):
    """Tokens that each image keeps, int64 [B]; drawn once, for a copy to the device waits for it."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    drawn = torch.rand(n_batch, generator=generator, dtype=torch.float32, device="cpu")
    return (n_tokens * (low + (high - low) * drawn)).long().clamp(min=1).to(device)
