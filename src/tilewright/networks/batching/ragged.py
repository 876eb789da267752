"""Kept tokens packed, image after image, and attended by the ragged kernel."""

import torch

from tilewright.networks.token_layouts import Packed, Rectangle
from tilewright.packed.pruners import Choice

ROOM = "shared"


def narrow(
    x: torch.Tensor, layout: Rectangle | Packed, choice: Choice, capacity: int | None, packed: type[Packed] = Packed
) -> tuple[torch.Tensor, Packed]:
    """Pack, or pack the packed again. packed: the layout to make.

    Where each image keeps as many as the host knows, or one less, that is the capacity, and nothing is asked.
    """
    bound = layout.n_batch * choice.most
    if choice.most - choice.least <= 1:
        capacity = bound
    elif capacity is not None:
        capacity = min(capacity, bound)
    packing = layout.pack(x, choice.keep, capacity)
    assert packing.tokens is not None
    return packing.tokens, packed(packing, choice.most, choice.least == choice.most)
