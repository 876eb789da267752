"""Plans on a GPU: predicted against measured time, and where the time of planning goes. Prints a table and writes CSVs.

Each pattern is planned with each of the device's tiles alone and with all of them, from the calibration of this GPU,
which is made first where there is none. Measured: replays of a CUDA graph, tokens in plan order.

    python benchmarks/bench_cost_model.py --output results/logs/cost_model.csv --orders none window
"""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import api, blocks, graph, models, reorder, schedule, targets
from tilewright.blocks import tiles
from tilewright.core.timing import time_gpu
from tilewright.targets.cuda.tile_lists import Item
from tilewright.targets.measure import expected

# Workload, heads, head dim.
CASES = (
    ("vil-tiny-512-s1-exact", 6, 64),
    ("vil-tiny-512-s1-exact", 3, 32),
    ("vil-tiny-256-s1-exact", 6, 64),
    ("vil-tiny-1024-s1-exact", 6, 64),
    ("vil-tiny-1024-s1-exact", 3, 32),
    ("vil-tiny-384-s1", 3, 32),
    ("vil-tiny-1024-s1", 3, 32),
    ("regionvit-tiny-384-s1", 2, 32),
    ("dynamicvit-s-384", 6, 64),
    ("random-4096", 6, 64),
    ("power-4096", 6, 64),
    ("kept-16384", 6, 64),
)
EFFORT = {"min_reps": 10, "max_seconds": 0.1, "rse_target": 0.01}


def main():
    """Plan, measure, print, write."""
    parser = argparse.ArgumentParser(description="Predicted against measured time on this GPU")
    parser.add_argument("--output", type=Path, default=Path("results/logs/cost_model.csv"))
    parser.add_argument("--orders", nargs="+", default=["none", "window"])
    parser.add_argument("--ordered", type=Path, nargs="*", default=[], help="ordered graphs, NAME.ORDER.npz")
    arguments = parser.parse_args()
    patterns = {tuple(path.stem.rsplit(".", 1)): path for path in arguments.ordered}
    patterns |= {(name, order): None for name, *_ in CASES for order in arguments.orders}
    rows = []
    for (name, order), path in patterns.items():
        pattern = graph.load(path) if path else made(name)
        if path is None:
            if order == "window" and pattern.row_hint is None:
                continue
            pattern, _ = reorder.apply(pattern, order)
        for _, heads, head_dim in [case for case in CASES if case[0] == name]:
            rows += planned(pattern, {"name": name, "order": order}, heads, head_dim)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_csv(arguments.output, index=False)
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False, float_format="{:.2f}".format))
    off = frame["error"].abs()
    print(f"{len(off)} plans: median error {off.median():.1%}, worst of nine in ten {off.quantile(0.9):.1%}")


def made(name):
    """The pattern of a workload, or a random one: equal chances, or a power law of keys; kept: 30 % of the keys."""
    kind, _, size = name.partition("-")
    rng = np.random.default_rng(0)
    if kind == "random":
        return graph.from_pattern(rng.random((int(size), int(size))) < 0.05)
    if kind == "power":
        chance = 40 / (1 + rng.permutation(int(size)))
        return graph.from_pattern(rng.random((int(size), int(size))) < chance)
    if kind == "kept":
        n = int(size)
        kept = np.sort(rng.permutation(n)[: n * 3 // 10]).astype(np.int32)
        return graph.from_csr(np.arange(n + 1) * len(kept), np.tile(kept, n), (n, n))
    return models.build(name)


def planned(ordered, row, heads, head_dim):
    """A row for each tile alone and one for all, of an ordered pattern."""
    facts, device = targets.facts("cuda"), targets.describe("cuda")
    names = tiles.fitting(facts.TILES, ordered.shape, facts.FEWEST_ROWS)
    options = {"heads": heads, "head_dim": head_dim, "dtype": "bfloat16", "split_keys": facts.SPLIT_KEYS}
    begin = time.perf_counter()
    covers = blocks.extract_all(ordered, [tiles.parse(name) for name in names])
    extracted = time.perf_counter()
    profiles = expected(covers, device="cuda", **options)
    profiled = time.perf_counter()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, head_dim, generator=generator, device="cuda").bfloat16()
        for n in (ordered.n_rows, ordered.n_cols, ordered.n_cols)
    )
    rows = []
    for chosen in [*((name,) for name in names), tuple(names)]:
        if len(chosen) == 1 == len(names) and rows:
            continue
        some = {name: covers[name] for name in chosen}, {name: profiles[name] for name in chosen}
        solver = "greedy" if len(chosen) == 1 else "highs"
        solving = time.perf_counter()
        found = schedule.solve(*some, targets.limits(device), solver=solver, time_limit_s=10.0, seed=0)
        solved = time.perf_counter()
        plan = api.Plan(ordered, *some, found, reorder={"order": row["order"], "work_fraction": 0.0})
        plan(q, k, v, ordered=True)
        torch.cuda.synchronize()
        prepared = time.perf_counter()
        us = time_gpu(lambda plan=plan: plan(q, k, v, ordered=True), **EFFORT).p50_us
        launches = [launch.lists for launch in plan._prepared[True, 0].launches]
        rows.append(
            row
            | {"heads": heads, "dim": head_dim, "tiles": "+".join(chosen)}
            | {"rank": "+".join(str(x.rank if x.partial else None) for x in launches)}
            | {
                "items": sum(len(x.items) for x in launches),
                "steps": sum(x.items[:, Item.STEPS].sum() for x in launches),
            }
            | {"predicted": found.predicted_us, "us": us, "error": found.predicted_us / us - 1}
            | {"extract_s": extracted - begin, "profile_s": profiled - extracted, "solve_s": solved - solving}
            | {"prepare_s": prepared - solved}
        )
    return rows


if __name__ == "__main__":
    main()
