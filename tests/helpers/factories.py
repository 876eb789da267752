"""Blocks, profiles and limits made by hand or at random, for tests of the schedule."""

import math
from dataclasses import replace

import numpy as np

from tilewright import devices
from tilewright.attention.blocks import Blocks, work
from tilewright.attention.blocks.tiles import parse
from tilewright.attention.profile import ItemShape, Profile
from tilewright.devices import Limits


def make_blocks(tile, runs, *, graph_id="graph", partial=None, n_cols=4096):
    """Blocks of `tile` with ``runs[region][block]`` key runs each; a region has as many rows as its blocks
    together.

    partial: bool [U] or None (all full), which runs carry a mask.
    """
    tile = parse(tile)
    per_region = np.array([len(region) for region in runs])
    region_rows = int(per_region.max()) * tile.rows
    flat = np.array([n for region in runs for n in region], np.int64)
    run_ptr = np.concatenate(([0], np.cumsum(flat)))
    index = np.arange(run_ptr[-1]) - np.repeat(run_ptr[:-1], flat)
    keys = (index[:, None] * tile.run + np.arange(tile.run)).astype(np.int32) % n_cols
    partial = np.zeros(len(index), bool) if partial is None else partial
    masks = np.full((1, tile.rows, -(-tile.run // 8)), 0b01010101, np.uint8)
    entries = np.where(partial, tile.rows * tile.run // 2, tile.rows * tile.run).astype(np.int32)
    row_ptr = (np.arange(len(flat) + 1) * tile.rows).astype(np.int32)
    region_ptr = np.concatenate(([0], np.cumsum(per_region * tile.rows))).astype(np.int32)
    return Blocks(
        tile=tile,
        shape=(int(row_ptr[-1]), n_cols),
        graph_id=graph_id,
        meta={},
        region_rows=region_rows,
        region_ptr=region_ptr,
        row_ptr=row_ptr,
        run_ptr=run_ptr,
        run_keys=keys,
        run_mask=np.where(partial, 0, -1).astype(np.int32),
        masks=masks,
        run_entries=entries,
    )


def make_profile(
    cover,
    *,
    latency=None,
    launch_us=5.0,
    tile_us=0.0,
    occupancy=1.0,
    split_keys=None,
    device=None,
    rng=None,
):
    """A profile of `cover`. latency: ``f(rows, runs, masked) -> us``; by default the padded area at a fixed
    rate, jittered by `rng` where one is given."""
    tile, known = cover.tile, {}

    def shape(k):
        rows, runs, masked, split = form = items.forms[k]
        area = rows * runs * tile.run
        if form not in known:
            jitter = rng.uniform(0.7, 1.4) if rng else 1.0
            known[form] = latency(rows, runs, masked) if latency else (1.0 + area / 500) * jitter
        cost = known[form]
        return ItemShape(
            rows=rows,
            runs=runs,
            masked=masked,
            split=split,
            items=int(items.counts[k]),
            latency_us=float(cost),
            alone_us=1.25 * float(cost),
            p20_us=float(cost) * 0.9,
            p80_us=float(cost) * 1.1,
            repetitions=10,
            rse=0.01,
            resources={"working_set_bytes": 4.0 * area, "registers": float(rows)},
            occupancy=occupancy,
        )

    items = work.items(cover, split_keys)
    return Profile(
        tile=tile.name,
        source="measured",
        blocks_id=cover.id,
        graph_id=cover.graph_id,
        heads=2,
        head_dim=8,
        dtype="float32",
        split_keys=split_keys,
        launch_us=launch_us,
        tile_us=tile_us,
        shapes=tuple(shape(k) for k in range(items.n_shapes)),
        device=device or {},
        device_id=devices.device_id(device) if device else "device",
    )


def make_limits(**changes):
    """Limits that allow everything in one round on two lanes, but for `changes`."""
    free = {"lanes": 2, "per_block": {}, "envelope": {}, "occupancy": math.inf, "max_tile_kinds": 8}
    return Limits(**{**free, **changes})


def random_inputs(seed, n_regions, tiles=("4x1", "2x1", "4x8"), most_runs=3, region_rows=4, **profile):
    """``(blocks, profiles)`` of `n_regions` regions with 1 to `most_runs` runs a block."""
    rng = np.random.default_rng(seed)
    blocks = {}
    for name in tiles:
        runs = rng.integers(1, most_runs + 1, (n_regions, region_rows // parse(name).rows))
        blocks[name] = make_blocks(name, runs.tolist(), partial=rng.random(runs.sum()) < 0.5)
    launch = {name: float(rng.uniform(0.1, 0.5)) for name in tiles}
    keywords = {"rng": rng, **profile}
    return blocks, {name: make_profile(b, **{"launch_us": launch[name], **keywords}) for name, b in blocks.items()}


def quick_profiles(covers, *, device, seed, bias_heads, heads, head_dim, dtype, split_keys):
    """Profiles of invented timings, in place of `measure.expected`."""

    def one(cover):
        made = make_profile(cover, split_keys=split_keys, device=devices.describe(device))
        needs = {"working_set_bytes": 1.0, "shared_bytes": 1.0}
        shapes = tuple(replace(shape, resources=needs) for shape in made.shapes)
        return replace(made, heads=heads, head_dim=head_dim, dtype=dtype, shapes=shapes)

    return {name: one(cover) for name, cover in covers.items()}
