"""DynamicViT: before the blocks 3, 6 and 9 a learned predictor scores the patches, and a fixed share stays.

Source: Rao et al., "DynamicViT" (2021), evaluation mode.
"""

import math
from typing import Annotated, Literal

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.masks.dynamicvit import VARIANTS, kept_of
from tilewright.packed.pruners import Choice, Settings, _scores
from tilewright.packed.pruners._predictor import Predictor


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """keep_ratio: rho; ``int(n rho^i)`` of n patches stay. predictor: ``random`` goes without a checkpoint of it."""

    keep_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    predictor: Literal["learned", "random"] = "learned"

    @property
    def learned(self) -> bool:
        """See `Settings`."""
        return self.predictor == "learned"


class Pruner(nn.Module):
    """See the module."""

    before, inside = VARIANTS["deit-s"][2], ()

    def __init__(self, params: Params, width: int, n_tokens: int):
        """See the contract."""
        super().__init__()
        self.counts = kept_of(n_tokens - 1, params.keep_ratio)
        self.score_predictor = nn.ModuleList(Predictor(width) for _ in self.before)

    def forward(self, time: int, x: Tensor, layout: _scores.Layout, heads: int) -> tuple[Tensor, Choice]:
        """See the contract."""
        count = self.counts[time]
        alive = layout.valid[:, 1:]
        score = self.score_predictor[time](layout.padded(x)[:, 1:], alive)
        # The class token stays anyway.
        order = _scores.best_first(F.pad(score, (1, 0), value=math.inf), layout)
        return x, Choice(_scores.marked(order[:, : 1 + count], layout.length), 1 + count, 1 + count)
