"""Kept tokens first, padded to the longest image, masked."""

from tilewright.networks.layouts import Rectangle


def narrow(x, layout, choice, *_):
    """As many places as the longest image needs: the host asks how many that is, unless it knows them but for one."""
    slots = choice.most if choice.most - choice.least <= 1 else int(choice.keep.sum(1).max())
    x, lengths = layout.compact(x, choice.keep, slots)
    return x, Rectangle(layout.n_batch, slots, x.device, None if choice.least == choice.most else lengths)
