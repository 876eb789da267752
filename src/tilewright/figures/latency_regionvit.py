"""Latency of RegionViT's attention by resolution and order: dense attention, greedy and ILP schedules."""

from tilewright.figures import bars

FAMILY = "regionvit"


def needs(config):
    """Bench files of the family's workloads, and the paper's bars."""
    return bars.needs(config, FAMILY)


def draw(inputs):
    """See `tilewright.figures.bars`."""
    return bars.draw(inputs, FAMILY)
