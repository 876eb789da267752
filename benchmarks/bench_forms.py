"""Forms of the GPU's kernel: the search on this GPU, and plans with what it found against plans with the default.

Each pattern is planned with each tile alone, before a search and after it, each time with calibrations of its own, in
an empty cache that is deleted in the end. Results are compared with the reference; times are replays of a CUDA graph,
tokens in plan order. Prints what became of each candidate, then a row a plan: a chosen form that is slower than the
default by more than noise, or wrong, is a fault. To keep forms: ``tilewright calibrate --forms``.

    python benchmarks/bench_forms.py --head-dim 64 --dtype bfloat16
"""

import argparse
import os
import tempfile
import time

import pandas as pd
import torch

import tilewright
from tilewright import models, reference, targets
from tilewright.blocks import tiles
from tilewright.core.timing import time_gpu
from tilewright.targets.cuda import calibration, form_search, forms

CASES = (("vil-tiny-256-s1-exact", "window"), ("vil-tiny-512-s1-exact", "window"), ("dynamicvit-s-384", "none"))
EFFORT = {"min_reps": 10, "max_seconds": 0.2, "rse_target": 0.01}
# Every so many queries are compared with the reference.
EVERY = 16


def main():
    """Plan, search, plan again, measure, print."""
    parser = argparse.ArgumentParser(description="Forms of the kernel on this GPU")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TILEWRIGHT_CACHE"] = cache
        compared(arguments.heads, arguments.head_dim, arguments.dtype)


def compared(heads, head_dim, dtype):
    """Print the tables."""
    facts, seconds = targets.facts("cuda"), []
    chosen = [tiles.parse(name) for name in facts.TILES]
    options = {"heads": heads, "head_dim": head_dim, "dtype": getattr(torch, dtype), "device": "cuda"}

    def planned():
        begin = time.perf_counter()
        calibration.of(chosen, head_dim, dtype)
        seconds.append(time.perf_counter() - begin)
        graphs = {case: models.build(case[0]) for case in CASES}
        return {
            (*case, tile): tilewright.plan(graph, reorder=case[1], tiles=[tile], solver="greedy", **options)
            for case, graph in graphs.items()
            for tile in tiles.fitting(facts.TILES, graph.shape, facts.FEWEST_ROWS)
        }

    before = planned()
    begin = time.perf_counter()
    form_search.search(chosen, head_dim, dtype)
    seconds.append(time.perf_counter() - begin)
    after = planned()
    print("calibration {:.1f} s, search {:.1f} s, calibration of what it found {:.1f} s".format(*seconds))
    print(_candidates(chosen, head_dim, dtype).to_string(index=False))
    rows = []
    for (pattern, order, tile), plan in before.items():
        default = _measured(plan)
        found = _measured(after[pattern, order, tile])
        rows.append({"pattern": pattern, "order": order, "tile": tile})
        for kind, columns in (("default", default), ("chosen", found)):
            rows[-1] |= {f"{kind}_{column}": value for column, value in columns.items()}
        rows[-1]["faster"] = f"{default['us'] / found['us'] - 1:+.1%}"
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3g}".format))


def _candidates(chosen, head_dim, dtype):
    """What became of each candidate, a row each."""
    rows = []
    for tile in chosen:
        stated = forms.made_for(tile, head_dim, dtype)
        found = forms.held(forms.path_of(stated), stated)
        for trial in found.trials:
            us = dict(zip(("window_us", "kept_us"), trial.us, strict=False))
            rows.append(
                {"tile": tile.name, **trial.form, **us, "status": trial.status, "kept": trial.form in found.forms}
            )
    return pd.DataFrame(rows)


def _measured(plan):
    """Predicted and measured microseconds of a plan, and the greatest relative error of some rows."""
    generator, rows = torch.Generator("cuda").manual_seed(0), reference.sample_rows(plan.graph, EVERY, 0)
    q, k, v = (
        torch.randn(1, plan.heads, n, plan.head_dim, generator=generator, device="cuda").to(plan.dtype)
        for n in (plan.graph.n_rows, plan.graph.n_cols, plan.graph.n_cols)
    )
    found = plan(q, k, v, ordered=True).cpu()[:, :, rows]
    right = reference.attention_rows(plan.graph, rows, q, k, v).cpu()
    us = time_gpu(lambda: plan(q, k, v, ordered=True), **EFFORT).p50_us
    return {"predicted": plan.schedule.predicted_us, "us": us, "error": float(reference.relative_error(found, right))}


if __name__ == "__main__":
    main()
