"""Costs of shape classes, computed instead of measured: a bead takes a nanosecond."""

from tilewright.blocks import work
from tilewright.core.timing import Timing
from tilewright.profile import shape_class


def measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s):
    """``(launch_us, tile_us, [ShapeClass, ...])`` of the work items of `blocks`."""
    items = work.items(blocks, split_keys)
    classes = []
    for cls in range(items.n_classes):
        beads = float(items.class_rows[cls] * items.class_runs[cls] * blocks.tile.run)
        us = 1e-3 * beads * heads * head_dim
        times = {"latency_us": us, "alone_us": us, "p20_us": us, "p80_us": us}
        resources = {"resources": {"beads": beads}, "occupancy": beads}
        classes.append(shape_class(items, cls, Timing(us, us, us, 1, 0.0), **times, **resources))
    return 0.5, 0.0, classes
