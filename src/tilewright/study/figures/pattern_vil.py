"""The true attention mask of a Vision Longformer layer, before and after each order, with its blocks."""

from tilewright.study.figures import _spy

FAMILY = "vil"


def needs(config):
    """Reordered graphs and blocks of the family's workload that ``config.figures`` names."""
    return _spy.needs(config, FAMILY)


def draw(inputs):
    """See `tilewright.study.figures._spy`."""
    return _spy.draw(inputs)
