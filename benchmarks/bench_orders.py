"""Orders side by side: what each makes of a pattern, how long it takes, and on a GPU how fast its plan runs.

For each pattern and order: the gathered work over dense attention; the seconds of the order; for each tile the steps
that a GPU executes (64 keys each) and the rank of its masks (see `TileLists`). On a GPU, also
the time of a call of the plan, by graph replay with tokens in plan order, and that time over the `window` order's.
Patterns of `grids` are masks without declared windows, as users give them; `irregular` ones are no grids.

    python benchmarks/bench_orders.py --patterns study --orders none,window,ic,hc --output results/logs/bench_orders.csv
"""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.sparse import csr_array

from tilewright import api, blocks, models, reorder
from tilewright.blocks import tiles, work
from tilewright.core.timing import time_gpu
from tilewright.graph import from_pattern
from tilewright.targets.cuda import facts, tile_lists

TILES = ("64x1", "32x1")
STEP_KEYS = 64
# Heads x head dim of masks, which state none.
SIZES = {"heads": 6, "head_dim": 64}
STUDY = [f"{family}-{size}{stage}"
         for family, stage in (("vil-tiny", "-s1"), ("regionvit-tiny", "-s1"), ("dynamicvit-s", ""))
         for size in (128, 224, 384)]  # fmt: skip
EXACT = ["vil-tiny-224-s1-exact", "vil-tiny-512-s1-exact", "vil-tiny-1024-s1-exact", "vil-tiny-1024-s1"]
EFFORT = {"min_reps": 10, "max_seconds": 1.0, "rse_target": 0.01}


def windows(sides, reach, *, edge="clipped", n_global=0, seed=None):
    """Windows of ``2 * reach[a] + 1`` tokens along each axis a of a grid of `sides`, as a CSR array.

    edge: of the grid; windows are ``clipped`` at it, ``shifted`` inwards, or ``wrapped`` around. n_global: tokens
    before the grid that see and are seen by all. seed: the tokens are shuffled.
    """
    axes = [_axis(n, f, edge) for n, f in zip(sides, reach, strict=True)]
    pattern = axes[0]
    for axis in axes[1:]:
        rows, cols = pattern.shape[0] * axis.shape[0], pattern.shape[1] * axis.shape[1]
        a, b = pattern.tocoo(), axis.tocoo()
        row = (a.row[:, None].astype(np.int64) * axis.shape[0] + b.row).ravel()
        col = (a.col[:, None].astype(np.int64) * axis.shape[1] + b.col).ravel()
        pattern = csr_array((np.ones(len(row), bool), (row, col)), shape=(rows, cols))
    local, n = pattern.tocoo(), n_global + pattern.shape[0]
    at, one = np.arange(n), np.arange(n_global)
    row = np.concatenate((local.row + n_global, np.repeat(one, n), np.repeat(at[n_global:], n_global)))
    col = np.concatenate((local.col + n_global, np.tile(at, n_global), np.tile(one, n - n_global)))
    place = at if seed is None else np.random.default_rng(seed).permutation(n)
    return csr_array((np.ones(len(row), bool), (place[row], place[col])), shape=(n, n))


def _axis(n, f, edge):
    at, around = np.arange(n), np.arange(-f, f + 1)
    row, col = np.repeat(at, 2 * f + 1), (at[:, None] + around).ravel()
    if edge == "shifted":
        col = (np.clip(at, f, n - 1 - f)[:, None] + around).ravel()
    inside = (col >= 0) & (col < n) | (edge == "wrapped")
    return csr_array((np.ones(inside.sum(), bool), (row[inside], col[inside] % n)), shape=(n, n))


GRIDS = {
    "128x128": {"sides": (128, 128), "reach": (7, 7)},
    "128x128+1": {"sides": (128, 128), "reach": (7, 7), "n_global": 1},
    "128x128+1 shuffled": {"sides": (128, 128), "reach": (7, 7), "n_global": 1, "seed": 0},
    "128x128 shifted shuffled": {"sides": (128, 128), "reach": (7, 7), "edge": "shifted", "seed": 0},
    "128x128 wrapped shuffled": {"sides": (128, 128), "reach": (7, 7), "edge": "wrapped", "seed": 0},
    "100x60 shuffled": {"sides": (100, 60), "reach": (5, 5), "seed": 0},
    "90x90 3x11 shuffled": {"sides": (90, 90), "reach": (3, 11), "seed": 0},
    "24x24x24 shuffled": {"sides": (24, 24, 24), "reach": (3, 3, 3), "seed": 0},
    "band 16384 shuffled": {"sides": (16384,), "reach": (64,), "seed": 0},
    "256x256": {"sides": (256, 256), "reach": (7, 7)},
    "256x256+1 shuffled": {"sides": (256, 256), "reach": (7, 7), "n_global": 1, "seed": 0},
}
IRREGULAR = ["band and random", "power law", "window with holes"]
SETS = {"study": STUDY, "exact": EXACT, "grids": list(GRIDS), "irregular": IRREGULAR}


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Orders side by side")
    parser.add_argument("--patterns", default="study,exact,grids", help=f"of {', '.join(SETS)}, or names in them")
    parser.add_argument("--orders", default="none,window,ic,hc")
    parser.add_argument("--tiles", default="64x1", help="of the timed plans, e.g. 64x1,32x1")
    parser.add_argument("--solver", default="greedy", help="of the timed plans")
    parser.add_argument("--no-gpu", action="store_true", help="do not time plans")
    parser.add_argument("--output", type=Path, default=Path("results/logs/bench_orders.csv"))
    given = parser.parse_args()
    names = [name for part in given.patterns.split(",") for name in SETS.get(part, [part])]
    rows = []
    for name in names:
        graph = made(name)
        for order in given.orders.split(","):
            if order == "window" and graph.row_hint is None:
                continue
            rows.append({"pattern": name, "order": order, **measured(graph, order, given)})
            print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1), flush=True)
    frame = pd.DataFrame(rows)
    if "time_us" in frame:
        window = frame[frame["order"] == "window"].set_index("pattern")["time_us"]
        frame["over_window"] = frame["time_us"] / frame["pattern"].map(window)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(given.output, index=False)
    print(frame.round(4).to_string(index=False))


def made(name):
    """The graph of a pattern by its name."""
    if name in GRIDS:
        return from_pattern(windows(**GRIDS[name]))
    if name not in IRREGULAR:
        return models.build(name)
    generator, n = np.random.default_rng(0), 128 * 128
    if name == "window with holes":
        pattern = windows((128, 128), (7, 7), seed=0).tocoo()
        kept = generator.random(pattern.nnz) < 0.9
        return from_pattern(csr_array((pattern.data[kept], (pattern.row[kept], pattern.col[kept])), shape=(n, n)))
    per_row, exponent = (48, 0.8) if name == "power law" else (3, 0.0)
    weights = np.arange(1, n + 1) ** -exponent
    keys = generator.choice(n, n * per_row, p=weights / weights.sum())
    pattern = csr_array((np.ones(len(keys)), (np.repeat(np.arange(n), per_row), keys)), shape=(n, n))
    if name == "band and random":
        pattern += windows((n - 2,), (64,), n_global=2)
    return from_pattern(pattern > 0)


def measured(graph, order, given):
    """The columns of one row."""
    begin = time.perf_counter()
    ordered, info = reorder.apply(graph, order)
    row = {"work": info["work_fraction"], "seconds": info["seconds"], "apply_s": time.perf_counter() - begin}
    begin = time.perf_counter()
    covers = blocks.extract_all(ordered, [tiles.parse(name) for name in TILES])
    row["extract_s"] = time.perf_counter() - begin
    for name, cover in covers.items():
        items = work.items(cover, facts.SPLIT_KEYS)
        lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, STEP_KEYS)
        row[f"steps {name}"] = int(lists.items[:, tile_lists.Item.STEPS].sum())
        row[f"rank {name}"] = lists.rank
    if torch.cuda.is_available() and not given.no_gpu:
        row |= timed(graph, order, given)
    return row


def timed(graph, order, given):
    """Seconds that a plan takes to make, and microseconds that a call of it takes on the GPU."""
    sizes = {name: graph.meta.get(name, size) for name, size in SIZES.items()}
    begin = time.perf_counter()
    names = tuple(given.tiles.split(","))
    plan = api.plan(
        graph, **sizes, dtype=torch.bfloat16, device="cuda", reorder=order, tiles=names, solver=given.solver
    )
    row = {"plan_s": time.perf_counter() - begin, "predicted_us": plan.schedule.predicted_us}
    q, k, v = (
        torch.randn(1, sizes["heads"], n, sizes["head_dim"], dtype=torch.bfloat16, device="cuda")
        for n in (graph.n_rows, graph.n_cols, graph.n_cols)
    )
    taken = time_gpu(lambda: plan(q, k, v, ordered=True), **EFFORT)
    return row | {"time_us": taken.p50_us, "rse": taken.rse}


if __name__ == "__main__":
    main()
