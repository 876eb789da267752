"""Kept tokens alone, in a dense batch without a mask: for images that keep equal numbers, as DynamicViT's and EViT's
own code has it."""

import torch

from tilewright.core.errors import Unavailable
from tilewright.networks.token_layouts import Rectangle
from tilewright.packed.pruners import Choice

ROOM = None


def narrow(x: torch.Tensor, layout: Rectangle, choice: Choice, *_: None) -> tuple[torch.Tensor, Rectangle]:
    """A full rectangle. Raises `Unavailable` where numbers differ; the host asks, unless they are known to be equal."""
    length = choice.most
    if choice.least != choice.most:
        least, length = (int(end) for end in choice.keep.sum(1).aminmax())
        if least != length:
            raise Unavailable(f"expected images that keep equal numbers of tokens, found from {least} to {length}")
    return layout.compact(x, choice.keep, length)[0], Rectangle(layout.n_batch, length, x.device)
