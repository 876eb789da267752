"""Kept tokens alone, in a dense batch without a mask: for images that keep equal numbers, as DynamicViT's and EViT's
own code has it."""

from tilewright.core.errors import Unavailable
from tilewright.networks._layouts import Rectangle

ROOM = None


def narrow(x, layout, choice, *_):
    """A full rectangle. Raises `Unavailable` where numbers differ; the host asks, unless they are known to be equal."""
    slots = choice.most
    if choice.least != choice.most:
        least, slots = (int(end) for end in choice.keep.sum(1).aminmax())
        if least != slots:
            raise Unavailable(f"expected images that keep equal numbers of tokens, found from {least} to {slots}")
    return layout.compact(x, choice.keep, slots)[0], Rectangle(layout.n_batch, slots, x.device)
