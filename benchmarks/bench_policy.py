"""What choosing tiles and split lengths region by region gains on a CPU, measured: prints a table and writes a CSV.

Each pattern is planned with every tile of the device alone (the fastest is the best fixed tile), by greedy, by
descent and by an integer program over tiles, all at the device's own split length, and by the same program over tiles
and split lengths. Every schedule is checked against the reference first; those that are right then take turns. Beside
the measured medians and quintiles stand the prediction, the proven bound, and what is left to gain at most. A pattern
that is homogeneous stands beside those that mix: nothing is to be gained on it.

    python benchmarks/bench_policy.py --output results/logs/bench_policy.csv mix-4096-w128-k512-r64-g16
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import blocks, models, reference, reorder, schedule, targets
from tilewright.blocks import tiles
from tilewright.core.timing import time_together
from tilewright.targets.measure import measure

SIZES = {"heads": 6, "head_dim": 64}
# Beside the device's own: parts that leave a cache to the queries, and whole blocks, which need no merging.
LENGTHS = (256, None)
# A fixed tile that is predicted to be this many times slower than the fastest is not run.
SLOWER = 4
PATTERNS = (
    *("mix-4096-w128-k512-r64-g16", "mix-16384-w128-k2048-r64-g16"),
    *("powerlaw-4096-d32-e2.2", "powerlaw-16384-d32-e2.2"),
    "band-16384-w256-g1",
)


def main():
    """Plan, check, measure, print, write."""
    parser = argparse.ArgumentParser(description="What integer programming gains on this CPU")
    parser.add_argument("patterns", nargs="*", default=PATTERNS)
    parser.add_argument("--order", default="none")
    parser.add_argument("--solver", default="highs")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing, for each contender")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds that a tile is profiled for")
    parser.add_argument("--output", type=Path, default=Path("results/logs/bench_policy.csv"))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.patterns:
        rows += compared(name, arguments)
        frame = pd.DataFrame(rows)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(arguments.output, index=False)
        print(frame[frame["pattern"] == name].drop(columns="pattern").to_string(index=False), flush=True)


def compared(name, arguments):
    """Rows of the contenders of one pattern."""
    pattern, _ = reorder.apply(models.build(name), arguments.order)
    facts, generator = targets.facts("cpu"), torch.Generator().manual_seed(0)
    covers = blocks.extract_all(pattern, [tiles.parse(tile) for tile in tiles.fitting(facts.TILES, pattern.shape, 1)])
    lengths = facts.SPLIT_KEYS, *LENGTHS
    profiles = {
        tile: measure(cover, **SIZES, split_keys=lengths, budget_s=arguments.budget) for tile, cover in covers.items()
    }
    tokens = [torch.randn(1, SIZES["heads"], n, SIZES["head_dim"], generator=generator) for n in pattern.shape]
    tokens.append(torch.randn(tokens[1].shape, generator=generator))
    print(f"{name}: {pattern.n_rows} tokens, density {pattern.density:.4f}, order {arguments.order}", flush=True)
    places = reference.sample_rows(pattern, reference.stride(pattern.n_rows), 0)
    expected = reference.attention_rows(pattern, places, *tokens)
    found, calls = schedules(covers, profiles, arguments.solver), []
    for plan in found.values():
        prepare = targets.executor("cpu").prepare
        executor = prepare(plan, covers, **SIZES, dtype=torch.float32, ordered=True)
        error = reference.relative_error(executor(*tokens)[:, :, places], expected)
        if error > reference.TOLERANCE[torch.float32]:
            raise SystemExit(f"{name}: {plan.solver}: expected the reference's result, found an error of {error:.1e}")
        calls.append(lambda run=executor: run(*tokens))
    timings = time_together(calls, min_reps=5, max_seconds=arguments.seconds, rse_target=0.01)
    return [{"pattern": name, **row(policy, found[policy], t)} for policy, t in zip(found, timings, strict=True)]


def schedules(covers, profiles, solver):
    """``{policy: Schedule}``: the fixed tiles, and what the solvers choose."""
    limits = targets.limits(next(iter(profiles.values())).device)
    one_length = {tile: replace(profile, further=()) for tile, profile in profiles.items()}

    def solved(name, profiles, *chosen):
        taken = [{tile: files[tile] for tile in chosen or covers} for files in (covers, profiles)]
        return schedule.solve(*taken, limits, name)

    fixed = {f"fixed {tile}": solved("greedy", one_length, tile) for tile in covers}
    most = SLOWER * min(plan.predicted_us for plan in fixed.values())
    return {
        **{policy: plan for policy, plan in fixed.items() if plan.predicted_us <= most},
        **{name: solved(name, one_length) for name in ("greedy", "descent", solver)},
        f"{solver}, splits": solved(solver, profiles),
    }


def row(policy, plan, timing):
    """What is printed of a schedule and its time, in milliseconds."""
    count = np.bincount(plan.tile, minlength=len(plan.tiles))
    used = {f"{plan.tiles[t]}:{plan.lengths[n]}" for t, n in zip(plan.tile, plan.length, strict=True)}
    return {
        "policy": policy,
        "predicted_ms": round(plan.predicted_us / 1e3, 2),
        "bound_ms": round(plan.bound_us / 1e3, 2),
        "left": f"{plan.left:.2%}",
        "p20_ms": round(timing.p20_us / 1e3, 2),
        "p50_ms": round(timing.p50_us / 1e3, 2),
        "p80_ms": round(timing.p80_us / 1e3, 2),
        "repetitions": timing.repetitions,
        "items": " ".join(f"{name} x {n}" for name, n in zip(plan.tiles, count, strict=True) if n),
        "lengths": " ".join(sorted(used)),
        "parts": int(plan.split.sum()),
        "solve_s": round(plan.solve_s, 2),
    }


if __name__ == "__main__":
    main()
