"""Kept tokens first, padded to the length before any pruning, masked, and attended by torch's fused operators."""

from tilewright.networks._layouts import Rectangle

ROOM = None


def narrow(x, layout, choice, *_: None, rectangle=Rectangle):
    """As many positions as before. rectangle: the layout to make."""
    x, lengths = layout.compact(x, choice.keep, layout.length)
    return x, rectangle(layout.n_batch, layout.length, x.device, lengths)
