"""Kept tokens first, padded to the length before any pruning, masked, and attended by torch's fused operators."""

import torch

from tilewright.networks.token_layouts import Rectangle
from tilewright.packed.pruners import Choice

ROOM = None


def narrow(
    x: torch.Tensor, layout: Rectangle, choice: Choice, *_: None, rectangle: type[Rectangle] = Rectangle
) -> tuple[torch.Tensor, Rectangle]:
    """As many positions as before. rectangle: the layout to make."""
    x, lengths = layout.compact(x, choice.keep, layout.length)
    return x, rectangle(layout.n_batch, layout.length, x.device, lengths)
