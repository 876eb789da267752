"""Small patterns carried to a schedule with random choices, for tests of executors and bench."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from tilewright import graph, reference
from tilewright.attention import blocks, schedule
from tilewright.attention import plan as api
from tilewright.attention.blocks import tiles, work
from tilewright.attention.masks import Bias


def pattern(n_q, n_k, density=0.2, seed=0, n_global=1, empty=1):
    """A random pattern with `n_global` rows that see all keys and `empty` rows that see none."""
    rng = np.random.default_rng(seed)
    dense = rng.random((n_q, n_k)) < density
    rows = rng.permutation(n_q)
    dense[rows[:n_global]] = True
    dense[rows[n_global : n_global + empty]] = False
    dense[rows[0], rng.integers(n_k)] = True
    return dense


@st.composite
def patterns(draw, square=False):
    """Bool patterns with at least one entry, most of them with equal rows, empty rows and a global row and column."""
    rows = draw(st.integers(1, 24))
    cols = rows if square else draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dense = rng.random((rows, cols)) < draw(st.sampled_from([0.05, 0.2, 0.6]))
    dense[rng.integers(0, rows, rows // 3)] = dense[rng.integers(0, rows, rows // 3)]
    dense[rng.integers(0, rows, rows // 4)] = False
    if draw(st.booleans()):
        dense[0] = dense[:, 0] = True
    dense[-1, -1] = True
    return dense


def reordered(dense, seed=0, **meta):
    """The pattern as a graph in a random order; seed: None for the order that it has."""
    rng = np.random.default_rng(seed)
    orders = (np.arange(n) if seed is None else rng.permutation(n) for n in dense.shape)
    return graph.from_pattern(dense, meta=meta).reordered(*orders)


def covers(ordered, names, region_rows=32):
    return {name: blocks.extract(ordered, tiles.parse(name), region_rows) for name in names}


def scheduled(covers, split_keys=None, seed=0, rounds=2, device_id="device"):
    """A schedule that gives each region a tile and a round at random."""
    rng = np.random.default_rng(seed)
    n_regions = next(iter(covers.values())).n_regions
    tile, turn = rng.integers(len(covers), size=n_regions), rng.integers(rounds, size=n_regions)
    parts = []
    for t, cover in enumerate(covers.values()):
        items = work.items(cover, split_keys)
        region = cover.region[items.block]
        keep = tile[region] == t
        columns = {name: getattr(items, name)[keep] for name in ("block", "run_lo", "run_hi", "shape", "split")}
        parts.append({"tile": np.full(keep.sum(), t, np.int16), "round": turn[region[keep]], **columns})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["round"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    first, none = next(iter(covers.values())), ("",) * len(covers)
    return schedule.Schedule(
        graph_id=first.graph_id,
        tiles=tuple(covers),
        blocks_ids=tuple(cover.id for cover in covers.values()),
        blocks_paths=none,
        profile_paths=none,
        split_keys=split_keys,
        lanes=2,
        solver="greedy",
        status="heuristic",
        objective="sum",
        predicted_us=1.0,
        objective_us=1.0,
        bound_us=1.0,
        gap=0.0,
        lower_bounds={},
        model_size={},
        solve_s=0.0,
        device_id=device_id,
        lane=np.zeros(len(order), np.int16),
        start_us=np.zeros(len(order)),
        **columns,
    )


def prepared(
    prepare,
    dense,
    names,
    qkv,
    *,
    split_keys=None,
    rounds=2,
    ordered=False,
    seed=0,
    region_rows=32,
    bias=None,
    scale=None,
    **options,
):
    """``(executor, its arguments, reference of its result)`` of a random order and schedule, for tokens q, k and v.

    prepare: of the executor's module; options: further ones for it.
    """
    pattern = reordered(dense, seed)
    cover = covers(pattern, names, region_rows)
    row, col = pattern.row_order, pattern.col_order
    call = prepare(
        scheduled(cover, split_keys, seed, rounds),
        cover,
        heads=qkv[0].shape[1],
        head_dim=qkv[0].shape[3],
        dtype=qkv[0].dtype,
        row_order=row,
        col_order=col,
        ordered=ordered,
        bias=bias,
        scale=scale,
        **options,
    )
    if isinstance(bias, Bias):
        rows, cols = np.ogrid[: dense.shape[0], : dense.shape[1]]
        bias = bias.table[:, torch.from_numpy(bias.index(rows, cols))]
    expected = reference.attention(*(x.cpu() for x in qkv), torch.from_numpy(dense), bias=bias, scale=scale)
    if not ordered:
        return call, qkv, expected
    q, k, v = qkv
    return call, (q[:, :, row], k[:, :, col], v[:, :, col]), expected[:, :, row]


def running(plan, form):
    """`plan`, running a form of torch's own attention as if that was measured to be the fastest."""
    times = {form: 1e-3}
    profiles = {name: replace(of, torch_us=times) for name, of in plan.profiles.items()}
    settings = {"bias": plan.bias, "scale": plan.scale, "reorder": plan.reorder, "units": plan.units}
    return api.Plan(plan.graph, plan.blocks, profiles, schedule.choose(plan.schedule, times), **settings)
