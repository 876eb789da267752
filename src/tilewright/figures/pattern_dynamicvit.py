"""The true attention mask of a DynamicViT layer, before and after each order, with its blocks."""

from tilewright.figures import spy

FAMILY = "dynamicvit"


def needs(config):
    """Reordered graphs and blocks of the family's workload that ``config.figures`` names."""
    return spy.needs(config, FAMILY)


def draw(inputs):
    """See `tilewright.figures.spy`."""
    return spy.draw(inputs)
