"""The speed that this project holds itself to on a CPU, measured: prints a table and writes it as a CSV.

Vision Longformer's first stage with its exact 15x15 window on 128x128 tokens and a global one, 3 heads of 32, float32:
the plan that the library makes by itself (order window, three tiles, highs) against dense SDPA (8 times faster) and
against every form of compiled FlexAttention, in the natural order and in the plan's (2 times faster than the fastest).
All take turns, with tokens that stand in plan order and with tokens that stand in the natural order and are permuted
inside the call. Then how far the predicted latencies of several sizes, orders and tiles are from the measured ones
(median at most 15 %).

    python benchmarks/bench_cpu.py --output results/logs/bench_cpu.csv
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tilewright import devices, masks
from tilewright.attention import blocks, reorder, schedule
from tilewright.attention.blocks import tiles
from tilewright.attention.measure import measure
from tilewright.torch_attention.flex import UNTUNED
from tilewright_study.baselines.sparse import flex, sdpa_dense
from tilewright_study.experiments.attention import Row, run
from tilewright_study.experiments.attention.run import Tokens
from tilewright_study.measure import rows as _rows
from tilewright_study.measure.effort import Effort

SIZES = {"heads": 3, "head_dim": 32}
BAR = "vil-tiny-512-s1-exact"
OTHERS = ("vil-tiny-224-s1", "regionvit-tiny-224-s1", "dynamicvit-s-224", "dynamicvit-s-384")
ORDERS = ("none", "window")
MIXED = ("16x1", "64x1", "64x64")
TILE_SETS = (("64x1",), MIXED)
SPLIT_KEYS = 1024
EFFORT = Effort(rse=0.02, min_repetitions=5, max_seconds=3.0)
SHOWN = ["model", "provider", "variant", "reorder", "tiles", "ordered", "p50_us", "rse", "predicted_us", "status"]


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Speed and predictions on this CPU")
    parser.add_argument("--output", type=Path, default=Path("results/logs/bench_cpu.csv"))
    output = parser.parse_args().output
    turns = bar()
    rows = turns + [row for name in (BAR, *OTHERS) for order in ORDERS for row in predicted(masks.build(name), order)]
    frame = pd.DataFrame(rows, columns=Row.columns())
    _rows.write(output, Row, rows)
    print(frame[SHOWN].to_string(index=False))
    verdict(pd.DataFrame(turns, columns=Row.columns()), frame[len(turns) :])


def bar():
    """Rows of the contenders of `BAR`, which take turns."""
    pattern, runs = masks.build(BAR), []
    for order in ORDERS:
        tokens = Tokens(in_order(pattern, order), **SIZES)
        places = (True,) if order == "none" else (True, False)
        runs += [
            run._variant(flex, variant, tokens, {"provider": "flex", "ordered": ordered})
            for variant in UNTUNED
            for ordered in places
        ]
        if order == "none":
            runs.append(run._variant(sdpa_dense, "torch", tokens, {"provider": "sdpa_dense", "ordered": True}))
        else:
            runs += run._runs(*solved(tokens, MIXED), "+".join(MIXED), tokens)
    return run._in_turns(runs, EFFORT)


def in_order(pattern, order):
    """`pattern` in `order`, which its rows name."""
    ordered, info = reorder.apply(pattern, order)
    return replace(ordered, meta={**ordered.meta, "reorder": info})


def predicted(pattern, order):
    """Rows of the plans of every tile set for `pattern` in `order`."""
    tokens = Tokens(in_order(pattern, order), **SIZES)
    return [row for names in TILE_SETS for row in plan(tokens, names)]


def plan(tokens, names):
    """The rows of a plan with the tiles `names`."""
    return run.run_schedule(*solved(tokens, names), tokens, EFFORT, tiles="+".join(names))


def solved(tokens, names):
    """``(schedule, blocks)`` of the graph of `tokens` with the tiles `names`."""
    covers = blocks.extract_all(tokens.graph, [tiles.parse(name) for name in names])
    profiles = {name: measure(cover, **SIZES, split_keys=SPLIT_KEYS) for name, cover in covers.items()}
    limits = devices.limits(devices.describe("cpu"), rounds=2)
    return schedule.solve(covers, profiles, limits, "highs", time_limit_s=10), covers


def verdict(turns, plans):
    """Print each bar, what was measured, and whether it holds. turns: rows of `bar`; plans: of `predicted`."""
    standing = turns["reorder"].eq("none") | ~turns["ordered"].astype(bool)
    times = {
        where: turns[kept & turns["status"].eq("ok")].groupby("provider")["p50_us"].min()
        for where, kept in (("in plan order", ~standing), ("in the natural order", standing))
    }
    dense, error = times["in the natural order"]["sdpa_dense"], (plans["predicted_us"] / plans["p50_us"] - 1).abs()
    bars = [(f"x faster than dense SDPA, tokens {where}", dense / p50["tilewright"], 8) for where, p50 in times.items()]
    bars += [
        (f"x faster than FlexAttention, tokens {where}", p50["flex"] / p50["tilewright"], 2)
        for where, p50 in times.items()
    ]
    for what, value, least in bars:
        print(f"{value:8.3f} {what}, at least {least}: {'holds' if value >= least else 'MISSED'}")
    median = error.median()
    print(f"{median:8.3f} median error of the prediction, at most 0.15: {'holds' if median <= 0.15 else 'MISSED'}")


if __name__ == "__main__":
    main()
