"""Latency of RegionViT's attention by resolution and order: dense attention, greedy and ILP schedules."""

from tilewright.study.figures import _bars

FAMILY = "regionvit"


def needs(config):
    """Bench files of the family's workloads, and the paper's bars."""
    return _bars.needs(config, FAMILY)


def draw(inputs):
    """See `tilewright.study.figures._bars`."""
    return _bars.draw(inputs, FAMILY)
