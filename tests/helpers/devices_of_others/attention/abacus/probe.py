"""Costs of shapes, computed instead of measured: a bead takes a nanosecond."""

from tilewright.attention.blocks import work
from tilewright.attention.profile import item_shape
from tilewright.core.timing import Timing


def measure(blocks, *, heads, head_dim, dtype, split_keys, seed, budget_s):
    """``(launch_us, tile_us, [ItemShape, ...])`` of the work items of `blocks`."""
    items = work.items(blocks, split_keys)
    shapes = []
    for shape in range(items.n_shapes):
        beads = float(items.shape_rows[shape] * items.shape_runs[shape] * blocks.tile.run)
        us = 1e-3 * beads * heads * head_dim
        times = {"latency_us": us, "alone_us": us, "p20_us": us, "p80_us": us}
        resources = {"resources": {"beads": beads}, "occupancy": beads}
        shapes.append(item_shape(items, shape, Timing(us, us, us, 1, 0.0), **times, **resources))
    return 0.5, 0.0, shapes
