"""Attention over all pairs by `scaled_dot_product_attention`: the oracle, and what gradients go through.

Of the kernels that torch has it takes the fastest by itself, cuDNN's on Hopper.
"""

from typing import TYPE_CHECKING

import msgspec
import torch.nn.functional as F

if TYPE_CHECKING:
    import torch

    from tilewright.networks.video_attentions import Call, Video


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing can be stated."""


class Attention:
    """See the contract of the package."""

    order, stateful = None, False

    def __init__(self, settings: Settings, video: "Video"):
        """Nothing is prepared."""

    def __call__(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", call: "Call | None") -> "torch.Tensor":
        """Attend."""
        return F.scaled_dot_product_attention(q, k, v)
