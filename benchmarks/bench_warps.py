"""Tiles by warps that gather beside warps that multiply, against the plain kernel: checked, then timed, on Hopper.

First each form by warps attends to a small pattern of each kind in a process of its own, with a time limit, and is
compared with the reference: what fails there is not timed. Then, for each case, all forms of 64 and 128 rows run the
same work items; results of some rows are compared once more, and CUDA graph replays take turns. Times are medians.

    python benchmarks/bench_warps.py --output results/logs/bench_warps.csv
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import blocks, models, reference, reorder, targets
from tilewright.blocks import tiles, work
from tilewright.core.timing import time_gpu
from tilewright.targets.cuda import config, executor, forms, tile_lists
from tilewright.targets.setting import setting

# Case: (pattern, its options, order, heads, head dim, longest key range of an item, kind that is tried before).
CASES = {
    "kept": ("dynamicvit-s-2048-b1", {"keep_ratio": 0.3}, "none", 6, 64, None, "keep"),
    "S=64": ("vil-medium-wide-512-s2-exact", {}, "window", 6, 64, 512, "windows"),
    "S=128": ("vil-medium-wide-1024-s2-exact", {}, "window", 6, 64, 512, "windows"),
    "S=256": ("vil-medium-wide-2048-s2-exact", {}, "window", 6, 64, 512, "windows"),
    "S=256 3x32": ("vil-small-1024-s1-exact", {}, "window", 3, 32, 512, "narrow"),
    "mix": ("mix-4096-w128-k512-r64-g16", {}, "none", 6, 64, 512, "mix"),
}
KINDS = {
    "windows": CASES["S=64"],
    "keep": ("dynamicvit-s-512-b1", {"keep_ratio": 0.3}, "none", 6, 64, None, None),
    "narrow": ("vil-small-256-s1-exact", {}, "window", 3, 32, 512, None),
    "mix": ("mix-1024-w128-k128-r16-g16", {}, "none", 6, 64, 512, None),
}
TILES, DTYPE = ("64x1", "128x1"), torch.bfloat16
# Every so many queries are compared with the reference.
EVERY = 64
# Seconds: of each trial, of all trials, and of everything.
TRIAL_S, TRIALS_S, ALL_S = 45, 60, 105
# Turns, and effort of each.
TURNS, EFFORT = 5, {"min_reps": 4, "max_seconds": 0.03, "rse_target": 0.01}


def main():
    """Try, time, print, write."""
    parser = argparse.ArgumentParser(description="Tiles by warps on this GPU")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--try", dest="tried", nargs=3, help="kind, tile and number of a form")
    parser.add_argument("--time", dest="timed", help="a case; what may run is read from stdin")
    given = parser.parse_args()
    if given.tried:
        kind, tile, number = given.tried
        tried(kind, tile, int(number))
    elif given.timed:
        timed(given.timed)
    else:
        compared(given.cases, given.output)


def contenders(tile, head_dim):
    """The plain kernel's default and its form of 128 keys a step, then the forms by warps."""
    found = config.candidates(tiles.parse(tile), head_dim, DTYPE, forms.room(targets.describe("cuda")))
    gathering = [form for form in found if form.loads == config.GATHER]
    plain = [gathering[0], *(form for form in gathering[1:] if form.step_keys == 128)]
    return [*plain[:2], *(form for form in found if form.loads == config.WARPS)]


class Case:
    """A pattern on the device: its tokens, and launches of its work items."""

    def __init__(self, pattern, overrides, order, heads, head_dim, split_keys, kind):
        self.graph, _ = reorder.apply(models.build(pattern, overrides), order)
        self.heads, self.head_dim, self._split_keys, self._covers, self._lists = heads, head_dim, split_keys, {}, {}

    def lists(self, tile, step_keys):
        """Work items of a tile, in steps of so many keys."""
        if tile not in self._covers:
            cover = blocks.extract(self.graph, tiles.parse(tile))
            self._covers[tile] = cover, work.items(cover, self._split_keys)
        if (tile, step_keys) not in self._lists:
            cover, items = self._covers[tile]
            columns = items.block, items.run_lo, items.run_hi
            self._lists[tile, step_keys] = tile_lists.build(cover, *columns, step_keys, forms=("factors", "bytes"))
        return self._lists[tile, step_keys]

    def begin(self):
        """Tokens, and what the reference finds for some."""
        generator, graph = torch.Generator("cuda").manual_seed(0), self.graph
        self.tokens = [
            torch.randn(1, n, self.heads, self.head_dim, generator=generator, device="cuda").to(DTYPE).transpose(1, 2)
            for n in (graph.n_rows, graph.n_cols, graph.n_cols)
        ]
        self._rows = reference.sample_rows(graph, EVERY, 0)
        self._right = reference.attention_rows(graph, self._rows, *self.tokens).cpu()

    def launch(self, tile, form):
        """``(call, kernel, error)`` of a form."""
        common = setting(self.graph.shape, self.heads, self.head_dim, DTYPE)
        lists, device = self.lists(tile, form.step_keys), torch.device("cuda", torch.cuda.current_device())
        launch = executor.Launch(lists, tiles.parse(tile), common, device, form)
        q, k, v = self.tokens
        loads = launch.loads(q, k, v)
        if loads != form.loads:
            raise ValueError(f"expected a launch that loads by {form.loads}, found {loads} (rank {lists.rank})")
        error = 0.0
        for _ in range(2):
            # Twice: the counters of split blocks are to be as they were.
            out = torch.full_like(q, torch.nan)
            kernel = launch(q, k, v, out)
            error = max(error, float(reference.relative_error(out[:, :, self._rows].cpu(), self._right)))
        return (lambda: launch(q, k, v, out)), kernel, error


def tried(kind, tile, number):
    """One form attends to the pattern of a kind: prints what became of it."""
    case = Case(*KINDS[kind])
    form = contenders(tile, case.head_dim)[number]
    case.begin()
    _, kernel, error = case.launch(tile, form)
    right = error <= reference.TOLERANCE[DTYPE]
    print(json.dumps(["ok" if right else "wrong", f"{error:.1e}", kernel.n_regs, kernel.n_spills]))


def timed(name):
    """The plain forms of a case, and those by warps that stdin names, in turns: prints rows as JSON."""
    case, rows, calls = Case(*CASES[name]), [], []
    case.begin()
    chosen = [(tile, number, form) for tile in TILES for number, form in enumerate(contenders(tile, case.head_dim))]

    def add(tile, form):
        call, _, error = case.launch(tile, form)
        row = {"tile": tile, "form": label(form), "rank": case.lists(tile, form.step_keys).rank, "error": error}
        if error <= reference.TOLERANCE[DTYPE]:
            calls.append(call)
            rows.append(row | {"status": "ok"})
        else:
            print(json.dumps(row | {"status": "wrong"}), flush=True)

    for tile, _, form in chosen:
        case.lists(tile, form.step_keys)
        if form.loads == config.GATHER:
            add(tile, form)
    allowed = json.loads(sys.stdin.readline())
    for tile, number, form in chosen:
        if [tile, number] in allowed:
            add(tile, form)
    us = np.array([[time_gpu(call, **EFFORT).p50_us for call in calls] for _ in range(TURNS)])
    # A product of queries and keys, and one of weights and values: two operations for each value.
    operations = 4 * case.graph.entries * case.heads * case.head_dim
    for row, each in zip(rows, np.median(us, axis=0).tolist() if calls else (), strict=True):
        print(json.dumps(row | {"us": round(each, 1), "tflops": round(operations / each / 1e6, 1)}), flush=True)


def label(form):
    """Keys a step, stages, most registers, and how keys are loaded."""
    return f"{form.step_keys}k{form.num_stages}s-r{form.maxnreg}-{form.loads}"


def compared(cases, output):
    """Run all trials side by side, then the cases one after the other; print a table and write it."""
    begin, command = time.perf_counter(), [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # They prepare their lists meanwhile.
    waiting = {name: subprocess.Popen([*command, "--time", name], **pipes) for name in cases}
    kinds = {CASES[name][6]: CASES[name][4] for name in cases}
    jobs = [
        (kind, tile, n, form)
        for kind, head_dim in kinds.items()
        for tile in TILES
        for n, form in enumerate(contenders(tile, head_dim))
        if form.loads == config.WARPS
    ]
    found = trials(command, jobs)
    bad = {job[:3]: each for job, each in found.items() if each[0] != "ok" or each[3]}
    print(f"{len(jobs)} trials in {time.perf_counter() - begin:.0f} s; wrong, failed or spilling:")
    for (kind, tile, _), each in bad.items():
        form = next(job[3] for job in jobs if job[:3] == (kind, tile, _))
        print(f"   {kind} {tile} {label(form)}: {each}")
    rows = []
    for name, process in waiting.items():
        allowed = [[j[1], j[2]] for j, each in found.items() if j[0] == CASES[name][6] and each[0] == "ok"]
        try:
            said, _ = process.communicate(json.dumps(allowed) + "\n", max(5, begin + ALL_S - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            print(f"{name}: no end in time", flush=True)
        part = [{"case": name, **json.loads(line)} for line in said.splitlines()]
        if part:
            print(pd.DataFrame(part).sort_values(["tile", "form"]).to_string(index=False), flush=True)
        rows += part
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_csv(output, index=False)
    if rows:
        summary(pd.DataFrame(rows))
    print(f"{time.perf_counter() - begin:.0f} s in all")


def trials(command, jobs):
    """``{job: [status, error, registers, spills]}``, as many processes at a time as there are cores."""
    found, left, running, begin = {}, list(jobs), {}, time.perf_counter()
    while left or running:
        while left and len(running) < max(2, len(os.sched_getaffinity(0)) - 2):
            job = left.pop(0)
            words = [*command, "--try", *map(str, job[:3])]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running[job] = process, time.perf_counter()
        over = time.perf_counter() - begin > TRIALS_S
        for job, (process, began) in list(running.items()):
            late = over or time.perf_counter() - began > TRIAL_S
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            said, errors = process.communicate()
            lines = said.splitlines()
            last = (errors.strip().splitlines() or ["no word"])[-1][:200]
            failed = "no end in time" if late else last
            found[job] = json.loads(lines[-1]) if process.returncode == 0 and lines else [failed, "", 0, 0]
            del running[job]
        if over:
            found |= {job: ["not tried", "", 0, 0] for job in left}
            left = []
        time.sleep(0.05)
    return found


def summary(frame):
    """The fastest of each kernel for each case."""
    frame = frame[frame["status"] == "ok"].copy()
    frame["kernel"] = np.where(frame["form"].str.endswith("warps"), "warps", "plain")
    best = frame.loc[frame.groupby(["case", "kernel"], sort=False)["us"].idxmin()]
    table = best.pivot(index="case", columns="kernel", values=["us", "tile", "form"])
    print(table.reindex(frame["case"].unique()).to_string())


if __name__ == "__main__":
    main()
