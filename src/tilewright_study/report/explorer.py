"""The data of the tile explorer: patterns as small pictures, schedules as items with the cells that each executes."""

import base64
import io

import numpy as np

from tilewright import graph
from tilewright.attention import blocks, profile, schedule
from tilewright.core.errors import ArtifactError
from tilewright_study import schedules
from tilewright_study.figures import _style
from tilewright_study.tables import _read

# Cells along the keys of a pattern, at most. Queries are exact: a stripe for each block.
CELLS = 480
# Schedules of more items are left out, by name: a page that holds them could not be handled.
MOST_ITEMS = 20_000


def scene(inputs):
    """What ``explorer.js`` draws, of JSON types: ``{"patterns", "plans", "colours", "omitted"}``.

    A pattern: its graph's facts and its picture, a PNG. A plan: a schedule's facts; ``edges``, the rows at which its
    blocks begin and end; and ``items`` by columns, where ``cells`` holds the cells of keys that an item reads,
    ``[from, to, from, to, …]``. Raises `ArtifactError` for a schedule whose graph, blocks or profiles are missing.
    """
    files = _read.by_kind(inputs, graph=graph.load, blocks=blocks.load, profile=profile.load, schedule=schedules.read)
    graphs = {(path.parent.name, path.stem): found for path, found in files["graph"].items()}
    covers, profiles = _by_place(files["blocks"]), _by_place(files["profile"])
    place = {key: i for i, key in enumerate(graphs)}
    plans, omitted = [], []
    for path, plan in files["schedule"].items():
        key = path.parts[-3:-1]
        found = covers.get(key, {}), profiles.get(key, {})
        _check(path, plan, graphs.get(key), *found)
        if plan.status == "skipped":
            omitted.append(f"{path}: {plan.solver} was skipped: {plan.reason}")
            continue
        if plan.n_items > MOST_ITEMS:
            omitted.append(f"{path}: too large to explore, {plan.n_items:,} items")
            continue
        name = f"{path.stem.rpartition('.')[0]} tiles, {_style.SOLVER_NAMES.get(plan.solver, plan.solver)}"
        of_tiles = ([some[tile] for tile in plan.tiles] for some in found)
        plans.append({"pattern": place[key], "name": name, **_plan(plan, *of_tiles)})
    tiles = dict.fromkeys(tile for plan in plans for tile in plan["tiles"])
    colours = {tile: _hex(_style.tile_colour(tile)) for tile in tiles}
    patterns = [_pattern(*key, found) for key, found in graphs.items()]
    return {"patterns": patterns, "plans": plans, "colours": colours, "omitted": omitted}


def _by_place(files):
    """``{(workload, order): {tile: loaded}}``. Ids are not unique: two orders may come to the same blocks, each timed
    alone."""
    found = {}
    for path, loaded in files.items():
        found.setdefault(path.parts[-3:-1], {})[path.stem] = loaded
    return found


def _check(path, plan, pattern, covers, profiles):
    if pattern is None or pattern.id != plan.graph_id:
        raise ArtifactError(f"{path}: expected its graph {plan.graph_id} among the inputs, found none of its order")
    try:
        schedule.verify_inputs(plan, covers, profiles)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error


def _hex(colour):
    from matplotlib.colors import to_hex

    return to_hex(colour)


def cell_keys(n_cols):
    """Keys of one cell of a pattern of `n_cols` keys."""
    return -(-n_cols // CELLS)


def shares(pattern):
    """float [cells, cells]: share of the pairs of each cell that `pattern` allows, whatever its size."""
    from scipy.sparse import csr_array

    by_row, by_col = cell_keys(pattern.n_rows), cell_keys(pattern.n_cols)
    rows, owner = np.arange(pattern.n_rows), pattern.entry_row_id
    shape = -(-pattern.n_rows // by_row), pattern.n_distinct, -(-pattern.n_cols // by_col)
    # Distinct rows in cells of keys, summed over the rows of each cell.
    reads = csr_array((np.ones(len(owner)), (owner, pattern.indices // by_col)), shape=shape[1:])
    holds = csr_array((np.ones(len(rows)), (rows // by_row, pattern.row_id)), shape=shape[:2])
    high, wide = (np.bincount(np.arange(n) // by) for n, by in zip(pattern.shape, (by_row, by_col), strict=True))
    return (holds @ reads).toarray() / np.outer(high, wide)


def _pattern(model, order, pattern):
    from PIL import Image

    # The root keeps a lone entry visible as a shade.
    shade = np.round(255 * (1 - 0.85 * np.sqrt(shares(pattern)))).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(shade).save(stream, "PNG", optimize=True)
    return {
        "model": model,
        "order": _style.order_name(order),
        "shape": pattern.shape,
        "entries": pattern.entries,
        "density": pattern.density,
        "cell": [cell_keys(size) for size in pattern.shape],
        "picture": f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}",
    }


def _plan(plan, covers, profiles):
    bounds = np.array([covers[t].row_ptr[b : b + 2] for t, b in zip(plan.tile, plan.block, strict=True)])
    edges = np.unique([0, covers[0].shape[0], *bounds.ravel()])
    entries, pairs, cells = zip(*(_reads(covers[t], lo, hi) for t, lo, hi in _runs(plan)), strict=True)
    items = {
        "stripe": np.searchsorted(edges, bounds[:, 0]),
        "tile": plan.tile,
        "round": plan.round,
        "lane": plan.lane,
        "split": plan.split.astype(int),
        "start_us": plan.start_us.round(2),
        "latency_us": _latencies_us(plan, profiles).round(3),
        "entries": np.array(entries),
        "pairs": np.array(pairs),
    }
    facts = {name: getattr(plan, name) for name in ("status", "gap", "predicted_us", "lanes", "tiles")}
    columns = {name: column.tolist() for name, column in items.items()}
    return {**facts, "edges": edges.tolist(), "items": {**columns, "cells": cells}}


def _latencies_us(plan, profiles):
    """float64 [I]: predicted latency of each item of a plan."""
    of_shapes = [[shape.latency_us for shape in profile.shapes] for profile in profiles]
    return np.array([of_shapes[t][k] for t, k in zip(plan.tile, plan.shape, strict=True)], float)


def _runs(plan):
    return zip(plan.tile.tolist(), plan.run_lo.tolist(), plan.run_hi.tolist(), strict=True)


def _reads(cover, lo, hi):
    """``(entries, pairs, cells)`` of the runs ``lo..hi``: allowed, executed, and the cells of keys that are read."""
    keys = cover.run_keys[lo:hi]
    cells = np.unique(keys[keys >= 0] // cell_keys(cover.shape[1]))
    cuts = np.flatnonzero(np.diff(cells) > 1)
    stretches = np.stack([cells[np.r_[0, cuts + 1]], cells[np.r_[cuts, len(cells) - 1]] + 1], axis=1)
    entries = int(cover.run_entries[lo:hi].sum(dtype=np.int64))
    return entries, keys.size * cover.tile.rows, stretches.ravel().tolist()
