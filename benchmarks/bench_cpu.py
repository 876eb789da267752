"""The speed that this project holds itself to on a CPU, measured: prints a table and writes results/logs/bench_cpu.csv.

Vision Longformer's first stage with its exact 15x15 window on 128x128 tokens and a global one, 3 heads of 32, float32:
the plan against dense SDPA (8 times faster) and against compiled FlexAttention in the natural order (2 times faster),
in one run; and how far the predicted latencies of several sizes, orders and tiles are from the measured ones (median
at most 25 %).

    python benchmarks/bench_cpu.py
"""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from tilewright import artifacts, blocks, hardware, models, profile, reorder, schedule, tiles
from tilewright.bench import COLUMNS, Effort, run_baselines, run_schedule
from tilewright.bench.rows import Tokens

SIZES = {"heads": 3, "head_dim": 32}
BAR = "vil-tiny-512-s1-exact"
OTHERS = ("vil-tiny-224-s1", "regionvit-tiny-224-s1", "dynamicvit-s-224", "dynamicvit-s-384")
ORDERS = ("none", "window")
TILE_SETS = (("64x1",), ("16x1", "64x1", "64x64"))
SPLIT_KEYS = 1024
EFFORT = Effort(rse=0.02, min_repetitions=5, max_seconds=3.0)


def main():
    """Measure, print, write."""
    rows = []
    for name in (BAR, *OTHERS):
        pattern = models.build(name)
        for order in ORDERS:
            rows += plans(pattern, order)
        if name == BAR:
            tokens = Tokens(pattern, **SIZES)
            rows += run_baselines(["sdpa_dense", "flex"], tokens, EFFORT, max_dense_tokens=20000)
    frame = pd.DataFrame(rows, columns=COLUMNS)
    output = Path("results/logs/bench_cpu.csv")
    artifacts.write_text(output, frame.to_csv(index=False, lineterminator="\n"))
    shown = ["model", "provider", "reorder", "tiles", "ordered", "p50_us", "rse", "predicted_us", "max_abs_error"]
    print(frame[[*shown, "status", "reason"]].to_string(index=False))
    verdict(frame)


def plans(pattern, order):
    """Rows of the plans of every tile set for `pattern` in `order`."""
    ordered, info = reorder.apply(pattern, order)
    ordered = replace(ordered, meta={**ordered.meta, "reorder": info})
    covers = {name: blocks.extract(ordered, tiles.parse(name)) for name in dict.fromkeys(sum(TILE_SETS, ()))}
    profiles = {name: profile.measure(cover, **SIZES, split_keys=SPLIT_KEYS) for name, cover in covers.items()}
    limits, tokens, rows = hardware.limits(hardware.describe("cpu"), rounds=2), Tokens(ordered, **SIZES), []
    for names in TILE_SETS:
        chosen = {name: covers[name] for name in names}
        found = schedule.solve(chosen, {name: profiles[name] for name in names}, limits, "highs", time_limit_s=10)
        rows += run_schedule(found, chosen, tokens, EFFORT, tiles="+".join(names))
    return rows


def verdict(frame):
    """Print each bar, what was measured, and whether it holds."""
    ours = frame[frame["provider"] == "tilewright"]
    best = ours[(ours["model"] == BAR) & ours["ordered"].eq(False)]["p50_us"].min()
    error = (ours["predicted_us"] / ours["p50_us"] - 1).abs().median()
    times = frame.set_index("provider")["p50_us"]
    for what, value, holds in (
        ("x faster than dense SDPA, at least 8", times["sdpa_dense"] / best, times["sdpa_dense"] / best >= 8),
        ("x faster than FlexAttention, at least 2", times["flex"] / best, times["flex"] / best >= 2),
        ("median error of the prediction, at most 0.25", error, error <= 0.25),
    ):
        print(f"{value:8.3f} {what}: {'holds' if holds else 'MISSED'}")


if __name__ == "__main__":
    main()
