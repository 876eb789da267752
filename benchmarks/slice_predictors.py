"""What predicting slice lists takes on this GPU, of the fastest dense call: checked, timed, and as a short table.

For each case: torch's dense kernels; `slices.predict` by pools of 128 and 32 queries and each rule; its parts by
themselves; both ways of counting codes and other sizes of blocks. Codes and lists of some groups are compared with
float64 and with the selection on the CPU before anything is timed. Times are medians of CUDA graph replays, all of one
run; a second call must not wait for the device.

    python benchmarks/slice_predictors.py --output results/logs/slice_predictors.csv
    TRITON_INTERPRET=1 python benchmarks/slice_predictors.py --tiny        no GPU: whether it runs at all
"""

import argparse
import itertools
from pathlib import Path

import pandas as pd
import torch
from triton.runtime.errors import OutOfResources

from tilewright import slices
from tilewright.core.errors import Unavailable
from tilewright.core.timing import time_call, time_gpu, time_host
from tilewright.slices import operators, prediction
from tilewright.slices.layout import make_layout
from tilewright.targets.cpu.slice_selection import Selection as CpuSelection
from tilewright.targets.cuda.slice_selection import Config, Selection, config_for
from tilewright.targets.selection import OCTAVE, Rule, part_layout, parts
from tilewright.torch_attention import kernels

# Tokens, heads, head dim, queries of a group.
CASES = {"32k-128": (32_760, 12, 128, 128), "75k-128": (75_600, 12, 128, 128), "32k-64": (32_768, 24, 64, 128)}
TINY = (300, 2, 64, 32)
BUDGET, RULES = 0.3, {"mass": 0.9, "keep": 0.2, "threshold": None}
CHECKED_GROUPS = 4
# Eighths of an octave that 16-bit means of queries move scores of up to 10 octaves by, and those that may differ.
CODE_ERROR = 1.0
SHOWN = ["case", "what", "setting", "p50_us", "of_dense", "density", "status"]


def tokens(n, heads, head_dim, device, dtype):
    """q and k [1, H, N, D] as projections leave them: neighbours are alike, and want some keys more than others."""
    centres = torch.randn(16, heads, head_dim, device=device) * 1.5
    near = centres[torch.arange(n, device=device) // 64 % 16]
    made = [(near + torch.randn(n, heads, head_dim, device=device)).to(dtype)[None] for _ in range(2)]
    return [x.transpose(1, 2) for x in made]


class Table:
    """The rows of a case; `dense_us`: of the fastest dense kernel."""

    def __init__(self, name, device, seconds):
        """Measure nothing yet."""
        self.name, self.device, self.seconds = name, device, seconds
        self.rows, self.dense_us = [], None

    def time(self, call):
        """Median microseconds."""
        timed = time_gpu if self.device.type == "cuda" else time_call
        return timed(call, min_reps=5, max_seconds=self.seconds, rse_target=0.002).p50_us

    def add(self, what, p50_us, setting="", **columns):
        """Add and print a row."""
        row = {"case": self.name, "what": what, "setting": setting, "p50_us": round(p50_us, 1), "status": "ok"}
        if self.dense_us:
            row["of_dense"] = round(p50_us / self.dense_us, 4)
        self.rows.append(row | columns)
        print(" ".join(f"{self.rows[-1].get(column, '')!s:>12}" for column in SHOWN), flush=True)

    def dense(self, q, k):
        """Time torch's dense kernels."""
        times = []
        for backend in kernels.NAMES if q.is_cuda else ():
            try:
                kernels.need(backend, q, k, k)
            except Unavailable as refusal:
                print(self.name, backend, refusal)
                continue
            times.append(self.time(lambda backend=backend: kernels.attend(backend, q, k, k)))
            self.add(f"dense {backend}", times[-1])
        self.dense_us = min(times) if times else self.time(lambda: slices.dense(q, k, k))


def check(q, k, layout, pool, rule, config=None):
    """Raise `AssertionError` unless codes and lists of some groups are right."""
    selection, scale = Selection(layout, q.device, config), q.shape[-1] ** -0.5
    codes = selection.pooled(q, k, pool, scale)
    keys = torch.empty(*codes.shape[:3], layout.capacity, dtype=torch.int32, device=q.device)
    counts = torch.empty(codes.shape[:3], dtype=torch.int32, device=q.device)
    selection.select(codes, rule, keys, counts)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CHECKED_GROUPS):
        h, g = (int(torch.randint(n, (), generator=generator)) for n in (layout.heads, layout.groups))
        group = q[0, h, g * layout.rows : (g + 1) * layout.rows].double()
        shares = sum(
            (part.mean(0) @ k[0, h].double().mT * scale).softmax(-1) * (len(part) / len(group))
            for part in group.split(pool)
        )
        exact = (shares.log2() * -OCTAVE).clamp(0, 255)
        # Codes are rounded down.
        worst = (codes[0, h, g].double() + 0.5 - exact).abs().max()
        assert worst <= 0.5 + CODE_ERROR, f"codes of group {g} of head {h}: {float(worst):.2f} off"
        one = layout._replace(batch=1, heads=1, queries=layout.rows)
        right = keys.new_empty(1, 1, 1, layout.capacity, device="cpu"), counts.new_empty(1, 1, 1, device="cpu")
        CpuSelection(one, torch.device("cpu")).select(codes[:1, h : h + 1, g : g + 1].cpu(), rule, *right)
        n = int(counts[0, h, g])
        assert n == int(right[1]), f"group {g} of head {h}: expected {int(right[1])} keys, found {n}"
        assert torch.equal(keys[0, h, g, :n].cpu(), right[0][0, 0, 0, :n]), f"keys of group {g} of head {h}"


def measure(table, case, dtype, tiny):
    """All rows of a case."""
    n, heads, head_dim, rows = case
    device = table.device
    q, k = tokens(n, heads, head_dim, device, dtype)
    table.dense(q, k)
    layout = make_layout(1, heads, n, n, rows=rows, budget=BUDGET)
    pools = (rows, rows // 4)
    for pool, (name, value) in itertools.product(pools, RULES.items()):
        options = {"pool": pool, "rows": rows, "budget": BUDGET, name: 0.5 / n if value is None else value}

        def call(options=options):
            return slices.predict(q, k, **options)

        lists = call()
        lists.check()
        if device.type == "cuda":
            unsynchronised(call)
        density = round(float(lists.density().mean()), 3)
        table.add(f"predict, pool {pool}", table.time(call), name, density=density)
        if device.type == "cuda" and name == "mass":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            peak = (torch.cuda.max_memory_allocated() - before - 4 * lists.keys.numel()) / 1e6
            table.add(
                "host of predict",
                time_host(call, min_reps=20, max_seconds=10 * table.seconds, rse_target=0.01)[1],
                f"workspace {peak:.0f} MB",
            )
    # The parts below are of the heads that are predicted at a time.
    part = parts(layout, n)[0]
    layout = part_layout(layout, part)
    q, k = q[part.batch, part.heads], k[part.batch, part.heads]
    alone(table, q, k, layout, pools, tiny)


def alone(table, q, k, layout, pools, tiny):
    """The parts of a prediction by themselves, with several `Config`s."""
    n, scale = layout.keys, q.shape[-1] ** -0.5
    rules = {
        "mass": Rule(mass=0.9, least=64, most=layout.capacity),
        "keep": Rule(count=n // 5, least=64, most=layout.capacity),
    }
    chosen, heads = config_for(q.shape[-1], q.dtype), f"of {layout.heads} heads"
    products = [(128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3)]
    programs = (264, 528, 1056, 2112)
    each = itertools.product(pools, products[:1] if tiny else products, programs[:1] if tiny else programs)
    for pool, (m, width, warps, stages), n_programs in each:
        config = chosen._replace(block_m=m, block_n=width, num_warps=warps, num_stages=stages, programs=n_programs)
        selection, setting = Selection(layout, table.device, config), f"{m}x{width} {warps}w{stages}s {n_programs}p"
        try:
            check(q, k, layout, pool, rules["mass"], config)
            table.add(
                f"codes, pool {pool}, {heads}",
                table.time(lambda s=selection, p=pool: s.pooled(q, k, p, scale)),
                setting,
            )
            means = selection.means(q, pool)
            table.add(f"means, pool {pool}", table.time(lambda s=selection, p=pool: s.means(q, p)), setting)
            table.add(
                f"log-sum-exps, pool {pool}",
                table.time(lambda s=selection, r=means: s.log_sum_exps(r, k, scale)),
                setting,
            )
        except OutOfResources as refusal:
            print(table.name, setting, refusal)
    codes = Selection(layout, table.device).pooled(q, k, pools[0], scale)
    keys = torch.empty(*codes.shape[:3], layout.capacity, dtype=torch.int32, device=table.device)
    counts = torch.empty(codes.shape[:3], dtype=torch.int32, device=table.device)
    counted = [(2048, 4), (4096, 4), (4096, 8), (1024, 4), (1024, 2), (2048, 1), (1024, 1), (512, 1)]
    for (name, rule), (block, warps) in itertools.product(rules.items(), counted[:1] if tiny else counted):
        config = Config(counted=block, count_warps=warps)
        check(q, k, layout, pools[0], rule, chosen._replace(counted=block, count_warps=warps))
        selection = Selection(layout, table.device, config)
        setting = f"{name} {block} {warps}w"
        table.add(f"select, {heads}", table.time(lambda s=selection, r=rule: s.select(codes, r, keys, counts)), setting)
    executor = operators.executor(layout, table.device)
    table.add(f"rank, {heads}", table.time(lambda: executor.rank(counts)))


def unsynchronised(call):
    """Raise unless a call goes through without the host waiting for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Prediction of slice lists on this GPU")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[:2])
    parser.add_argument("--seconds", type=float, default=0.2, help="most that one timing takes")
    parser.add_argument("--tiny", action="store_true", help="300 tokens, to see whether it runs")
    parser.add_argument("--output", type=Path, help="CSV of all rows")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda":
        if not given.tiny:
            parser.error("expected a GPU, found none; --tiny runs without one")
        # The interpreter stands in for the GPU.
        operators.EXECUTORS["cpu"] = "tilewright.targets.cuda.slices"
        prediction.SELECTIONS["cpu"] = Selection.__module__
    # The interpreter's bfloat16 is not right in every release.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    cases = {"tiny": TINY} if given.tiny else {name: CASES[name] for name in given.cases}
    rows = []
    for name, case in cases.items():
        table = Table(name, device, given.seconds)
        with torch.inference_mode():
            measure(table, case, dtype, given.tiny)
        rows += table.rows
    frame = pd.DataFrame(rows).reindex(columns=SHOWN)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(given.output, index=False)
    print(frame[frame.what.str.startswith(("dense", "predict", "host"))].to_string(index=False, na_rep=""))
    best = frame[frame.what.str.startswith(("codes", "select"))]
    best = best.assign(rule=best.setting.where(best.what.str.startswith("select"), "").str.split().str[0].fillna(""))
    print(
        best.sort_values("p50_us").groupby(["case", "what", "rule"]).head(3).sort_index()[SHOWN].to_string(index=False)
    )


if __name__ == "__main__":
    main()
