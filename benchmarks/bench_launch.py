"""Launches side by side, and blocks of keys, on this GPU: what either gains, measured. Prints tables, writes a CSV.

First the forms of each dense tile: keys gathered, loaded as blocks or by descriptors, in a few stages and warps, over
16,384 queries that see 30 % of the keys, kept first in plan order. The fastest form of each tile is the one that the
second part plans with. There each pattern runs with each tile alone, and as greedy and an integer program choose among
gathered tiles, and among dense ones too, with one or two kinds of tiles in a round. Results are compared with the
reference first; those that are right are replayed in turn as CUDA graphs, tokens in plan order, second-level cache
warm.

Calibrations are made in an empty cache that is deleted in the end. No further pattern begins after --seconds.

    python benchmarks/bench_launch.py --seconds 120
"""

import argparse
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import api, blocks, graph, models, reference, reorder, schedule, targets
from tilewright.blocks import tiles, work
from tilewright.core.errors import TilewrightError
from tilewright.core.timing import time_host
from tilewright.schedule import check
from tilewright.targets.cuda import calibration, config, executor, forms, tile_lists
from tilewright.targets.measure import expected
from tilewright.targets.setting import setting

SIZES = {"heads": 6, "head_dim": 64}
DTYPE = torch.bfloat16
GATHERED, DENSE = ("32x1", "64x1"), ("64x64", "128x64", "128x128")
KEPT = "kept-16384", "rcm"
# Pattern and order: what mixes first.
CASES = (
    KEPT,
    ("vil-tiny-512-s1-exact", "window"),
    ("band-16384-w256-g128", "none"),
    ("mix-4096-w128-k512-r64-g16", "none"),
    ("dynamicvit-s-2048", "window"),
    ("powerlaw-4096-d32-e2.2", "none"),
    ("mix-16384-w128-k2048-r64-g16", "none"),
)
# A tile whose masks have more pairs than this is left out: they take long to prepare. A tile alone that is predicted to
# take so many times as long as the fastest is not run.
MOST_MASKED, SLOWER = 5e7, 3
# Seconds of replays for a contender, and for its host's time; milliseconds of a replay.
REPLAYS_S, HOST_S, REPLAY_US = 0.12, 0.03, 300.0
# Every so many queries are compared with the reference.
EVERY = 64
PROCESSES = 8


def main():
    """Compile, compare forms, plan, check, measure, print, write."""
    parser = argparse.ArgumentParser(description="Launches side by side and blocks of keys on this GPU")
    parser.add_argument("patterns", nargs="*", help="of the cases; all by default")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", type=Path, default=Path("results/logs"), help="folder of the CSVs")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        compiled(arguments.compile)
        return
    begin = time.perf_counter()
    arguments.output.mkdir(parents=True, exist_ok=True)
    device = targets.describe("cuda")
    print(f"{device['name']}: launch {device['launch_us']} us, fork and join {device['fork_us']} us", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TILEWRIGHT_CACHE"] = cache
        print_forms(arguments.output / "bench_launch_forms.csv")
        chosen = [tiles.parse(name) for name in (*GATHERED, *DENSE)]
        calibration.of(chosen, SIZES["head_dim"], "bfloat16")
        print(f"forms and calibration: {time.perf_counter() - begin:.0f} s", flush=True)
        rows = []
        for name, order in CASES:
            if arguments.patterns and name not in arguments.patterns:
                continue
            if time.perf_counter() - begin > arguments.seconds:
                print(f"{name}: left out, {arguments.seconds:.0f} s are over")
                continue
            rows += compared(name, order)
            pd.DataFrame(rows).to_csv(arguments.output / "bench_launch.csv", index=False)
    print(f"{time.perf_counter() - begin:.0f} s")


# Forms


def candidates():
    """``[(tile, form), …]``: candidates of the calibration with a block a step, in two or three stages."""
    room = forms.room(targets.describe("cuda"))
    found = [(tiles.parse(name), None) for name in ("64x1", "128x1")]
    for tile in map(tiles.parse, DENSE):
        first, *others = config.candidates(tile, SIZES["head_dim"], DTYPE, room)
        # Of 64 rows, warps and registers are known to suit.
        each = [first, *(form for form in others if tile.rows > 64 or form.num_warps == first.num_warps)]
        each = [form for form in each if tile.rows > 64 or form.maxnreg == first.maxnreg]
        found += [(tile, form) for form in each if form.step_keys == tile.keys and form.num_stages in (2, 3)]
    return found


def runs_of(jobs, tokens):
    """Yield ``(tile, form, callable)`` for each of `jobs`, see `candidates`."""
    ordered = made(*KEPT)
    covers = blocks.extract_all(ordered, dict.fromkeys(tile for tile, _ in jobs))
    common = setting(ordered.shape, *SIZES.values(), DTYPE)
    for tile, stated in jobs:
        form = stated or config.for_tile(tile, SIZES["head_dim"], DTYPE, forms.room(targets.describe("cuda")))
        cover, items = covers[tile.name], work.items(covers[tile.name], targets.facts("cuda").SPLIT_KEYS)
        lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, form.step_keys)
        launch = executor.Launch(lists, tile, common, tokens[0].device, form)
        source = executor.Source(common, [(cover, np.unique(items.block))])
        call = executor.Executor(((launch,),), ordered.shape, *SIZES.values(), DTYPE, tokens[0].device, False, source)
        yield tile, form, lambda call=call: call(*tokens)


def compiled(part):
    """Compile a share of the candidates, one of `PROCESSES`: Triton finds them in its cache then."""
    tokens = random_tokens(made(*KEPT))
    for *_, call in runs_of(candidates()[part::PROCESSES], tokens):
        try:
            call()
        except (TilewrightError, RuntimeError):
            continue
    torch.cuda.synchronize()


def print_forms(output):
    """Print what the forms take, and keep the fastest form of each dense tile in the cache."""
    command = [sys.executable, __file__, "--compile"]
    for process in [subprocess.Popen([*command, str(part)]) for part in range(PROCESSES)]:
        process.wait()
    ordered, jobs = made(*KEPT), candidates()
    tokens = random_tokens(ordered)
    places, right = expected_rows(ordered, tokens)
    rows, calls = [], []
    for tile, form, call in runs_of(jobs, tokens):
        row = {"tile": tile.name, **asdict(form)}
        try:
            row["error"] = float(reference.relative_error(call()[:, :, places].cpu(), right))
        except (TilewrightError, RuntimeError) as error:
            rows.append(row | {"status": str(error).splitlines()[0][:60]})
            continue
        good = row["error"] <= reference.TOLERANCE[DTYPE]
        rows.append(row | {"status": "ok" if good else "WRONG"})
        calls += [(len(rows) - 1, form, tile, call)] if good else []
    for (at, *_), us in zip(calls, in_turn([call for *_, call in calls]), strict=True):
        flops = 4 * ordered.entries * math.prod(SIZES.values())
        rows[at] |= {"us": round(us[1], 1), "tflops": round(flops / us[1] / 1e6)}
    frame = pd.DataFrame(rows).drop(columns="trim").sort_values(["tile", "us"])
    frame.to_csv(output, index=False)
    print(f"{KEPT[0]}, {SIZES['heads']} x {SIZES['head_dim']}, bf16, by form")
    print(frame.to_string(index=False, float_format="{:.3g}".format), flush=True)
    for name in DENSE:
        timed = [(rows[at]["us"], form) for at, form, tile, _ in calls if tile.name == name]
        if timed:
            _, best = min(timed, key=lambda found: found[0])
            stated = forms.made_for(tiles.parse(name), SIZES["head_dim"], "bfloat16")
            forms.keep(forms.path_of(stated), forms.Choice(stated, (asdict(best),), ()))


# Patterns


def made(name, order):
    """A pattern in an order; ``kept-<tokens>``: all queries see 30 % of the keys, drawn at random."""
    kind, _, size = name.partition("-")
    if kind == "kept":
        n = int(size)
        kept = np.sort(np.random.default_rng(0).permutation(n)[: n * 3 // 10]).astype(np.int32)
        found = graph.from_csr(np.arange(n + 1) * len(kept), np.tile(kept, n), (n, n))
    else:
        found = models.build(name)
    return reorder.apply(found, order)[0]


def random_tokens(ordered):
    """q, k and v of a pattern."""
    generator, (n_q, n_k) = torch.Generator("cuda").manual_seed(0), ordered.shape
    shapes = ((1, SIZES["heads"], n, SIZES["head_dim"]) for n in (n_q, n_k, n_k))
    return [torch.randn(shape, generator=generator, device="cuda").to(DTYPE) for shape in shapes]


def expected_rows(ordered, tokens):
    """``(places, results)`` of some queries, by the reference."""
    places = reference.sample_rows(ordered, EVERY, 0)
    return places, reference.attention_rows(ordered, places, *tokens).cpu()


def compared(name, order):
    """Rows of the contenders of one pattern, which are printed."""
    ordered, facts = made(name, order), targets.facts("cuda")
    covers = blocks.extract_all(ordered, [tiles.parse(tile) for tile in (*GATHERED, *DENSE)])
    covers = {tile: cover for tile, cover in covers.items() if masked_pairs(cover) <= MOST_MASKED}
    profiles = expected(covers, device="cuda", **SIZES, dtype="bfloat16", split_keys=facts.SPLIT_KEYS)
    tokens = random_tokens(ordered)
    places, right = expected_rows(ordered, tokens)
    found, calls = [], []
    for policy, some, plan in solved(covers, profiles):
        try:
            run = api.Plan(ordered, *some, plan, reorder={"order": order, "work_fraction": 0.0})
            error = reference.relative_error(run(*tokens, ordered=True)[:, :, places].cpu(), right)
        except TilewrightError as refused:
            print(f"{name}, {policy}: {refused}")
            continue
        if not error <= reference.TOLERANCE[DTYPE]:
            raise SystemExit(f"{name}, {policy}: expected the reference's result, found an error of {error:.1e}")
        found.append((policy, plan))
        calls.append(lambda run=run: run(*tokens, ordered=True))
    times = in_turn(calls)
    fixed = min(us[1] for (policy, _), us in zip(found, times, strict=True) if policy.startswith("fixed"))
    rows = []
    for (policy, plan), call, us in zip(found, calls, times, strict=True):
        host_us = time_host(call, min_reps=5, max_seconds=HOST_S, rse_target=0.02)[1]
        rows.append(
            {"pattern": name, "order": order, "policy": policy, "rounds": in_rounds(plan)}
            | {"predicted": plan.predicted_us, "p20": us[0], "us": us[1], "p80": us[2]}
            | {"gain": f"{fixed / us[1] - 1:+.1%}", "left": f"{plan.left:.1%}", "host_us": host_us}
        )
    frame = pd.DataFrame(rows).drop(columns=["pattern", "order"])
    print(f"{name}, order {order}: gain over the best fixed tile")
    print(frame.to_string(index=False, float_format="{:.1f}".format), flush=True)
    return rows


def masked_pairs(cover):
    """Pairs of the runs of `cover` that have masks."""
    return int((cover.run_mask >= 0).sum()) * cover.tile.rows * cover.tile.run


def solved(covers, profiles):
    """``[(policy, (covers, profiles) of its tiles, Schedule), …]``, checked; none of one tile that is far slower."""
    found = []
    for policy, chosen, solver, kinds in contenders(covers):
        some = {tile: covers[tile] for tile in chosen}, {tile: profiles[tile] for tile in chosen}
        limits = targets.limits(targets.describe("cuda"), max_tile_kinds=kinds)
        plan = schedule.solve(*some, limits, solver, time_limit_s=5.0)
        if wrong := check.violations(plan, *some, limits):
            raise SystemExit(f"{policy}: {wrong[0]}")
        found.append((policy, some, plan))
    most = SLOWER * min(plan.predicted_us for policy, _, plan in found if policy.startswith("fixed"))
    return [each for each in found if each[2].predicted_us <= most or not each[0].startswith("fixed")]


def contenders(covers):
    """``[(policy, tiles, solver, kinds of tiles in a round), …]``."""
    gathered = [tile for tile in GATHERED if tile in covers]
    found = [(f"fixed {tile}", [tile], "greedy", 1) for tile in covers]
    several = {"gathered": gathered, "all": list(covers)}
    for what, chosen in several.items():
        if len(chosen) > 1 and (what == "gathered" or chosen != gathered):
            each = itertools.product(("greedy", "highs"), (1, 2))
            found += [(f"{solver}, {what}, {kinds} a round", chosen, solver, kinds) for solver, kinds in each]
    return found


def in_rounds(plan):
    """Items of each tile by round, such as ``64x1:120+128x64:40 | 32x1:3``."""
    rounds = []
    for number in np.unique(plan.round):
        used = np.bincount(plan.tile[plan.round == number], minlength=len(plan.tiles))
        rounds.append("+".join(f"{name}:{n}" for name, n in zip(plan.tiles, used, strict=True) if n))
    return " | ".join(rounds)


# Replays


def in_turn(calls):
    """Percentiles 20, 50 and 80 in microseconds of each of `calls`, whose CUDA graphs are replayed in turn."""
    graphs = [captured(call) for call in calls]
    rounds, begin = [], time.perf_counter()
    while len(rounds) < 7 or time.perf_counter() - begin < REPLAYS_S * len(calls):
        rounds.append([replayed_us(replay) / times for replay, times in graphs])
    return np.percentile(rounds, (20, 50, 80), axis=0).T.tolist()


def captured(call):
    """``(graph, calls in it)``, long enough for events."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)

    def of(times):
        found = torch.cuda.CUDAGraph()
        with torch.cuda.graph(found, stream=stream):
            for _ in range(times):
                call()
        found.replay()
        return found

    one = of(1)
    times = max(1, math.ceil(REPLAY_US / max(1.0, replayed_us(one))))
    return (one if times == 1 else of(times)), times


def replayed_us(replay):
    """Microseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
