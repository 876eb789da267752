"""What predicting slice lists takes on this GPU, of the fastest dense call: checked, timed, and as a short table.

For each case: torch's dense kernels; `slices.predict` by pools of 128 and 32 queries and each rule; its parts by
themselves, beside the bytes and products that they have to move and make; the host's time of `predict`, `attend` and
both. Codes and lists of some groups are compared with
float64 and with the selection on the CPU before anything is timed. Times are medians of CUDA graph replays, all of one
run; a second call must not wait for the device.

    python benchmarks/slice_predictors.py --output results/logs/slice_predictors.csv
    python benchmarks/slice_predictors.py --sweep       other sizes of blocks and ways of counting, too: minutes
    python benchmarks/slice_predictors.py --forms       after finding the fastest forms, as `tilewright calibrate` does
    TRITON_INTERPRET=1 python benchmarks/slice_predictors.py --tiny        no GPU: whether it runs at all
"""

import argparse
import itertools
from functools import partial
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
from tilewright.targets.cuda import slice_prediction_forms, slice_prediction_search
from tilewright.targets.cuda.slice_prediction_forms import Config, config_for
from tilewright.targets.cuda.slice_selection import Selection
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


def measure(table, case, dtype, tiny, sweep):
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
            setting = f"pool {pool}, workspace {peak:.0f} MB"
            attend = partial(slices.attend, q, k, k)
            for what, host_call in (
                ("host of predict", call),
                ("host of attend", partial(attend, lists)),
                ("host of both", lambda call=call, attend=attend: attend(call())),
            ):
                host_call()
                host_call()
                table.add(
                    what, time_host(host_call, min_reps=20, max_seconds=table.seconds, rse_target=0.01)[1], setting
                )
    # The parts below are of the heads that are predicted at a time.
    part = parts(layout, n)[0]
    layout = part_layout(layout, part)
    q, k = q[part.batch, part.heads], k[part.batch, part.heads]
    parts_alone(table, q, k, layout, pools)
    if sweep:
        alone(table, q, k, layout, pools, tiny)


def parts_alone(table, q, k, layout, pools):
    """Each launch of a prediction by itself, in the forms that `predict` takes, with what it has to do."""
    scale, heads, n = q.shape[-1] ** -0.5, layout.heads, layout.keys
    selection = Selection(layout, table.device)
    size, groups = q.element_size(), heads * layout.groups
    tokens_mb, codes_mb = q.numel() * size / 1e6, groups * n / 1e6
    for pool in pools:
        means = selection.means(q, pool)
        lse = selection.log_sum_exps(means, k, scale, None, pool)
        products, means_mb = 2e-9 * means.numel() * n, means.numel() * size / 1e6
        what = {
            "means": (lambda p=pool: selection.means(q, p), tokens_mb + means_mb, 0),
            "log-sum-exps": (
                lambda m=means, p=pool: selection.log_sum_exps(m, k, scale, None, p),
                *(tokens_mb + means_mb, products),
            ),
            "codes": (
                lambda m=means, s=lse, p=pool: selection._codes(m, k, s, p, False, scale),
                *(tokens_mb + means_mb + codes_mb, products),
            ),
        }
        for name, (call, megabytes, gflop) in what.items():
            call()
            p50_us = table.time(call)
            done = (
                f"{megabytes:.0f} MB, {gflop:.0f} GFLOP: {megabytes / p50_us:.2f} TB/s, {gflop / p50_us * 1e3:.0f} TF/s"
            )
            table.add(f"{name}, pool {pool}", p50_us, done)
    codes = selection.pooled(q, k, pools[0], scale)
    counts = torch.empty(codes.shape[:3], dtype=torch.int32, device=table.device)
    keys = counts.new_empty(*counts.shape, layout.capacity)
    for name, rule in rules_of(layout).items():
        selection.select(codes, rule, keys, counts)
        p50_us = table.time(lambda r=rule: selection.select(codes, r, keys, counts))
        megabytes = codes_mb + 4 * float(counts.double().sum()) / 1e6
        table.add(f"select, {name}", p50_us, f"{megabytes:.0f} MB: {megabytes / p50_us:.2f} TB/s")


def rules_of(layout):
    """Rules of selection that are timed by themselves."""
    return {
        "mass": Rule(mass=0.9, least=64, most=layout.capacity),
        "keep": Rule(count=layout.keys // 5, least=64, most=layout.capacity),
        "threshold": Rule(code=120, least=64, most=layout.capacity),
    }


def alone(table, q, k, layout, pools, tiny):
    """The parts of a prediction by themselves, with several `Config`s."""
    scale = q.shape[-1] ** -0.5
    rules = {name: rule for name, rule in rules_of(layout).items() if name != "threshold"}
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
    parser.add_argument("--sweep", action="store_true", help="parts with other sizes of blocks, too")
    parser.add_argument("--forms", action="store_true", help="find the fastest forms first")
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
    if given.forms:
        for head_dim in {CASES[name][2] for name in given.cases}:
            slice_prediction_search.search(head_dim, "bfloat16", anew=True)
            for kind in slice_prediction_search.kinds(head_dim, "bfloat16"):
                print(kind.what, head_dim, slice_prediction_forms.of(kind, device), flush=True)
    cases = {"tiny": TINY} if given.tiny else {name: CASES[name] for name in given.cases}
    rows = []
    for name, case in cases.items():
        table = Table(name, device, given.seconds)
        with torch.inference_mode():
            measure(table, case, dtype, given.tiny, given.sweep or given.tiny)
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
