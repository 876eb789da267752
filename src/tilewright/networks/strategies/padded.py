"""Kept tokens first, padded to the length before any pruning, masked: the baseline of the published comparison."""

from tilewright.networks.layouts import Rectangle


def narrow(x, layout, choice, *_):
    """As many places as before."""
    x, lengths = layout.compact(x, choice.keep, layout.slots)
    return x, Rectangle(layout.n_batch, layout.slots, x.device, lengths)
