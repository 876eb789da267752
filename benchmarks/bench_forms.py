"""Forms of the GPU's kernel: the search on this GPU, and what each pattern gains by a form of its own.

Forms and calibrations are made in an empty cache that is deleted in the end. Each pattern runs with each tile alone, in
the default form and in those that the search kept. Results are compared with the reference; times are replays of CUDA
graphs, in turns, tokens in plan order. Prints what became of each candidate, then a row a pattern, tile and form: what
was predicted, what stage T3 says, what was measured, and which form either takes. A form that is wrong, or one taken
that is slower than another by more than noise, is a fault. To keep forms: ``tilewright calibrate --forms``.

    python benchmarks/bench_forms.py --head-dim 64 --tiles 64x1 128x1 --output bench_forms.csv
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import api, blocks, graph, models, reference, reorder, schedule, targets
from tilewright.blocks import tiles
from tilewright.core.turns import time_in_turns
from tilewright.targets.cuda import calibration, form_search, forms
from tilewright.targets.measure import expected, measure

# Pattern and order: windows of 15 x 15 over 4,097, 16,385 and 65,537 tokens, and keys that are kept.
CASES = (
    ("vil-tiny-256-s1-exact", "window"),
    ("vil-tiny-512-s1-exact", "window"),
    ("vil-tiny-1024-s1-exact", "window"),
    ("kept-16384", "none"),
    ("dynamicvit-s-384", "none"),
)
EFFORT = {"min_reps": 15, "max_seconds": 0.15, "rse_target": 0.01}
PLACE = targets.facts("cuda").TORCH_DEVICE
# Every so many queries are compared with the reference.
EVERY = 64


def main():
    """Search, calibrate, plan, measure, print."""
    parser = argparse.ArgumentParser(description="Forms of the kernel on this GPU")
    parser.add_argument("patterns", nargs="*", help="of the cases; all by default")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--tiles", nargs="+", default=targets.facts("cuda").TILES)
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no further pattern begins")
    parser.add_argument("--output", type=Path, help="CSV of all rows")
    given = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TILEWRIGHT_CACHE"] = cache
        chosen, rows = [tiles.parse(name) for name in given.tiles], []
        form_search.search(chosen, given.head_dim, given.dtype)
        searched = time.perf_counter()
        calibration.of(chosen, given.head_dim, given.dtype)
        took = searched - begin, time.perf_counter() - searched
        print("search {:.1f} s, calibration of what it found {:.1f} s".format(*took), flush=True)
        print(_candidates(chosen, given.head_dim, given.dtype).to_string(index=False), flush=True)
        for name, order in CASES:
            if given.patterns and name not in given.patterns:
                continue
            if time.perf_counter() - begin > given.seconds:
                print(f"{name}: left out, {given.seconds:.0f} s are over")
                continue
            found = compared(name, order, chosen, given)
            print(pd.DataFrame(found).to_string(index=False, float_format="{:.4g}".format), flush=True)
            rows += found
    if given.output is not None:
        pd.DataFrame(rows).to_csv(given.output, index=False)


def _candidates(chosen, head_dim, dtype):
    """What became of each candidate, a row each."""
    rows = []
    for tile in chosen:
        for trial in _choice(tile, head_dim, dtype).trials:
            us = dict(zip(("window_us", "kept_us"), trial.us, strict=False))
            kept = trial.form in _choice(tile, head_dim, dtype).forms
            rows.append({"tile": tile.name, **trial.form, **us, "status": trial.status, "kept": kept})
    return pd.DataFrame(rows)


def _choice(tile, head_dim, dtype):
    stated = forms.made_for(tile, head_dim, dtype)
    return forms.held(forms.path_of(stated), stated)


def made(name):
    """A pattern; ``kept-<tokens>``: all queries see the same 30 % of the keys, the first ones."""
    kind, _, size = name.partition("-")
    if kind != "kept":
        return models.build(name)
    n = int(size)
    keys = np.arange(n * 3 // 10, dtype=np.int32)
    return graph.from_csr(np.arange(n + 1) * len(keys), np.tile(keys, n), (n, n))


def compared(name, order, chosen, given):
    """Rows of one pattern, of each tile and form."""
    ordered = reorder.apply(made(name), order)[0]
    covers = blocks.extract_all(ordered, chosen)
    sizes = {"heads": given.heads, "head_dim": given.head_dim}
    sizes |= {"dtype": given.dtype, "split_keys": targets.facts("cuda").SPLIT_KEYS}
    limits = targets.limits(targets.describe("cuda"))
    generator, dtype = torch.Generator(PLACE).manual_seed(0), getattr(torch, given.dtype)
    shapes = ((1, given.heads, n, given.head_dim) for n in (ordered.n_rows, ordered.n_cols, ordered.n_cols))
    q, k, v = (torch.randn(shape, generator=generator, device=PLACE).to(dtype) for shape in shapes)
    places = reference.sample_rows(ordered, EVERY, 0)
    right = reference.attention_rows(ordered, places, q, k, v).cpu()
    rows, calls = [], []
    for tile, each in covers.items():
        cover, kept = {tile: each}, _choice(each.tile, given.head_dim, given.dtype)
        predicted = expected(cover, device="cuda", **sizes)[tile].form
        timed = measure(each, device="cuda", **sizes).form
        default = kept.trials[0].form
        for form in [*kept.forms, *([] if default in kept.forms else [default])]:
            # As if the search had kept this form alone.
            forms.keep(forms.path_of(kept.made_for), forms.Choice(kept.made_for, (form,), kept.trials))
            profiles = expected(cover, device="cuda", **sizes)
            t3 = {tile: measure(each, device="cuda", **sizes)}
            plan, by_t3 = (schedule.solve(cover, known, limits, "greedy") for known in (profiles, t3))
            run = api.Plan(ordered, cover, profiles, plan, reorder={"order": order, "work_fraction": 0.0})
            error = float(reference.relative_error(run(q, k, v, ordered=True)[:, :, places].cpu(), right))
            rows.append(
                {
                    "pattern": name,
                    "tile": tile,
                    "form": "{step_keys}-{num_stages}-{num_warps}-{maxnreg}-{loads}".format_map(form),
                    "default": form == default,
                    "predicted_us": plan.predicted_us,
                    "t3_us": by_t3.predicted_us,
                    "error": error if error <= reference.TOLERANCE[dtype] else f"WRONG: {error:.1e}",
                    "by_model": form == predicted,
                    "by_t3": form == timed,
                }
            )
            calls.append(lambda run=run: run(q, k, v, ordered=True))
        forms.keep(forms.path_of(kept.made_for), kept)
    for row, timing in zip(rows, time_in_turns(calls, gpu=True, **EFFORT), strict=True):
        row["us"] = timing.p50_us
    return rows


if __name__ == "__main__":
    main()
