"""Kept tokens first, padded to the longest image, masked."""

import torch

from tilewright.networks.token_layouts import Rectangle
from tilewright.packed.pruners import Choice

ROOM = "even"


def narrow(x: torch.Tensor, layout: Rectangle, choice: Choice, capacity: int | None) -> tuple[torch.Tensor, Rectangle]:
    """As many positions as the longest image needs, or as the capacity has for each image; without one the host asks,
    unless it knows how many are kept but for one. Where an image keeps more, all class tokens are NaN."""
    length = choice.most
    if choice.most - choice.least > 1:
        length = int(choice.keep.sum(1).max()) if capacity is None else min(length, max(1, capacity // layout.n_batch))
    x, lengths = layout.compact(x, choice.keep, length)
    if capacity is not None and length < choice.most:
        x[:, 0].masked_fill_((lengths > length).any(), torch.nan)
    return x, Rectangle(layout.n_batch, length, x.device, None if choice.least == choice.most else lengths)
