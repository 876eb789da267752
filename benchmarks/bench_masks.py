"""Forms of masks on this GPU: what a launch of each pattern takes with factors, intervals, bytes and tiles of floats.

Each pattern is covered by one tile, and its work items run in one launch for each form that its masks can have, also
those that are not chosen. A form is timed after its result was compared with the reference; times are replays of a CUDA
graph, tokens in plan order. Beside them stands what the cost model predicts from this GPU's calibration, which is made
first where there is none. Steps: of the tile's keys, all and with a mask. Prints a row as soon as it is known, and
begins no further pattern after `--seconds`. All rows go to `--output`.

    python benchmarks/bench_masks.py --tile 64x1 --seconds 90 --output bench_masks.csv
"""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import blocks, graph, models, reference, reorder, targets
from tilewright.blocks import tiles, work
from tilewright.core.timing import time_gpu
from tilewright.targets.cuda import calibration, calibration_fit, cost_model, executor, forms, tile_lists
from tilewright.targets.cuda.tile_lists import Item
from tilewright.targets.setting import setting

# Patterns and their orders. Windows of 15 x 15 and a global token are there for control: they have factors.
CASES = (
    ("band-4096-w128-g1", "none"),
    ("band-16384-w128-g1", "none"),
    ("band-4096-w256-g1", "none"),
    ("band-16384-w256-g1", "none"),
    ("vil-tiny-256-s1-exact", "window"),
    ("vil-tiny-512-s1-exact", "window"),
    ("vil-tiny-512-s1-exact", "none"),
    ("dilated-4096-w128-d4-g1", "window"),
    ("dilated-16384-w128-d4-g1", "window"),
    ("causal-4096", "none"),
    ("axial-64x64", "ic"),
    ("bigbird-4096-b32-w3-r3-g2", "none"),
    ("powerlaw-4096-d32-e2.2", "ic"),
    ("band and random-4096", "none"),
    ("bigbird-16384-b64-w3-r3-g2", "none"),
    ("axial-128x128", "none"),
    ("causal-16384", "none"),
)
RANKS = {"factors": tile_lists.RANKS, "intervals": (tile_lists.INTERVALS,), "bytes": (tile_lists.BYTES,), "tiles": (0,)}
EFFORT = {"min_reps": 10, "max_seconds": 0.15, "rse_target": 0.005}
# Every so many queries are compared with the reference.
EVERY = 64


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Forms of masks on this GPU")
    parser.add_argument("--tile", default="64x1")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--output", type=Path, help="CSV of all rows")
    given, begin, rows = parser.parse_args(), time.perf_counter(), []
    tile = tiles.parse(given.tile)
    # Of the first form that is kept of the tile.
    known = calibration.of([tile], given.head_dim, given.dtype)[tile.name][0]
    seconds = f"{time.perf_counter() - begin:.0f} s"
    print(f"{targets.describe('cuda')['name']}, {seconds} for {cost_model.summary(known)}", flush=True)
    for name, order in CASES:
        if time.perf_counter() - begin > given.seconds:
            print(f"{name}: left out after {given.seconds:.0f} s")
            continue
        for row in measured(name, order, tile, known, given):
            rows.append(row)
            print(pd.DataFrame([row]).to_string(index=False, header=len(rows) == 1, formatters=SHOWN), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if given.output is not None:
        pd.DataFrame(rows).to_csv(given.output, index=False)


SHOWN = {
    **{"pattern": "{:>26}".format, "order": "{:>6}".format, "form": "{:>9}".format, "rank": "{:>4}".format},
    **{"steps": "{:>6}".format, "masked": "{:>6}".format, "us": "{:8.2f}".format, "predicted": "{:8.2f}".format},
    **{"off": "{:+7.1%}".format, "spread": "{:6.1%}".format, "mask_kb": "{:>8.0f}".format, "wrong": "{:7.0e}".format},
}


def made(name):
    """The graph of a pattern by its name: below a diagonal, a band with three random keys a row, or a workload."""
    kind, _, size = name.rpartition("-")
    if kind == "causal":
        n = int(size)
        at = np.arange(n, dtype=np.int32)
        keys = np.concatenate([at[: i + 1] for i in range(n)])
        return graph.from_csr(np.concatenate(([0], np.cumsum(at + 1, dtype=np.int64))), keys, (n, n))
    if kind == "band and random":
        at, rng = np.arange(int(size)), np.random.default_rng(0)
        dense = np.abs(at[:, None] - at) <= 64
        dense[at[:, None], rng.integers(0, len(at), (len(at), 3))] = True
        return graph.from_pattern(dense)
    return models.build(name)


def measured(name, order, tile, known, given):
    """Yield a row for each form that the masks of a pattern can have."""
    ordered, _ = reorder.apply(made(name), order)
    cover = blocks.extract(ordered, tile)
    items = work.items(cover, targets.facts("cuda").SPLIT_KEYS)
    dtype, shape = getattr(torch, given.dtype), ordered.shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((1, given.heads, n, given.head_dim) for n in (shape[0], shape[1], shape[1]))
    q, k, v = (torch.randn(each, generator=generator, device="cuda").to(dtype) for each in sizes)
    checked = reference.sample_rows(ordered, EVERY, 0)
    right = reference.attention_rows(ordered, checked, q, k, v).cpu()
    common, form = setting(shape, given.heads, given.head_dim, dtype), forms.of(tile, given.head_dim, dtype)
    columns = cover, items.block, items.run_lo, items.run_hi, form.step_keys
    chosen = tile_lists.build(*columns).rank
    incomplete = bool((ordered.row_degree == 0).any())
    for which, ranks in RANKS.items():
        lists = tile_lists.build(*columns, forms=(which,))
        if lists.rank not in ranks or not lists.partial:
            continue
        launch = executor.Launch(lists, tile, common, q.device, form)
        source = executor.Source(common, [(cover, np.unique(items.block))])
        call = executor.Executor(
            ((launch,),), shape, given.heads, given.head_dim, dtype, q.device, incomplete=incomplete, source=source
        )
        wrong = float(reference.relative_error(call(q, k, v).cpu()[:, :, checked], right))
        row = {"pattern": name, "order": order, "form": which + "*" * (lists.rank == chosen), "rank": lists.rank}
        steps, full = lists.items[:, Item.STEPS], lists.items[:, Item.FULL_STEPS]
        row |= {"steps": int(steps.sum()), "masked": int((steps - full).sum())}
        # A wrong result has no time.
        if not wrong <= reference.TOLERANCE[dtype]:
            yield row | {
                "us": np.nan,
                "predicted": np.nan,
                "off": np.nan,
                "spread": np.nan,
                "mask_kb": 0,
                "wrong": wrong,
            }
            continue
        timing = time_gpu(lambda call=call: call(q, k, v), **EFFORT)
        described = cost_model.describe(lists, known, given.heads, given.head_dim, given.dtype)
        predicted = calibration_fit.predicted(described, known)
        row |= {"us": timing.p50_us, "predicted": predicted, "off": predicted / timing.p50_us - 1}
        masks = launch._held[3].nbytes + launch._held[4].nbytes
        yield row | {
            "spread": (timing.p80_us - timing.p20_us) / timing.p50_us,
            "mask_kb": masks / 1024,
            "wrong": wrong,
        }


if __name__ == "__main__":
    main()
