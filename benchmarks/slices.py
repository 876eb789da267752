"""Attention by slice lists on this GPU: every form of the kernel, checked and timed against torch's dense kernels.

For each case: the dense kernels, every form of the kernel on lists of random keys at one sparsity (once for a head dim
and group size), then the fastest form at the other sparsities, on uneven lists, on lists of whole runs of keys, on
tokens in one piece, and what making, packing and unpacking lists takes. Every result is compared with float64 before it
is timed. Times are medians of CUDA graph replays, all of one run. Speed-ups are over the fastest dense kernel of the
case. Random keys are right for times and say nothing about recall.

    python benchmarks/slices.py --output results/logs/slices_forms.csv
    python benchmarks/slices.py --cases 32k-64 --forms chosen
    python benchmarks/slices.py --kernels        the few forms that may win, each tried in a process of its own first
    TRITON_INTERPRET=1 python benchmarks/slices.py --tiny        no GPU: whether it runs at all
"""

import argparse
import itertools
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from triton.runtime.errors import OutOfResources

from tilewright import reference, slices
from tilewright.core.errors import Unavailable
from tilewright.core.timing import time_call, time_gpu, time_host
from tilewright.slices import operators
from tilewright.targets.cuda import slice_config
from tilewright.targets.cuda.slice_config import SliceConfig
from tilewright.targets.cuda.slice_forms import device_facts
from tilewright.targets.cuda.slices import Executor
from tilewright.torch_attention import kernels

# Sparsity at which forms are compared; those that the fastest one is timed at.
COMPARED, SPARSITIES = 0.8, (0.5, 0.7, 0.8, 0.9)
WIDTHS = (16, 64, 128)
# Shares of keys that groups of uneven lists draw from, and factors of heads.
GROUP_SHARES, HEAD_FACTORS = (0.05, 0.6), (0.2, 1.6)
CHECKED_GROUPS = 4
# Octaves that maxima may grow by before sums are rescaled, in the forms that have this.
SLACK = 8
# Seconds in which forms of `contenders` have to be compiled and checked.
TRIAL_S = 60
# Times that each of them is timed.
TURNS = 3
SHOWN = ["case", "what", "sparsity", "form", "p50_us", "tflops", "over_dense", "error", "status"]


@dataclass(frozen=True)
class Case:
    """One attention call: tokens, heads, head dim and queries of a group."""

    tokens: int
    heads: int
    head_dim: int
    rows: int = 128


CASES = {
    "32k-128": Case(32_760, 12, 128),
    "75k-128": Case(75_600, 12, 128),
    "32k-64": Case(32_768, 24, 64),
    "32k-128-rows64": Case(32_760, 12, 128, 64),
    "32k-64-rows64": Case(32_768, 24, 64, 64),
}
TINY = Case(300, 2, 64)


def forms(case):
    """Every `SliceConfig` that is compared."""
    every = [
        SliceConfig(keys, stages, warps, ahead=ahead, k_columns=columns, slack=slack)
        for keys, stages, warps, ahead, (columns, slack) in itertools.product(
            (32, 64, 128), (2, 3, 4), (4, 8), (False, True), ((False, 0), (True, 0), (False, SLACK))
        )
        # Four stages of few keys, two of many; columns and rare rescales with 64 keys alone.
        if stages <= {32: 4, 64: 3, 128: 2 if case.head_dim == 128 else 3}[keys]
        and (keys, stages) != (32, 2)
        and not ((columns or slack) and keys != 64)
    ]
    most = device_facts(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))[1]
    return [form for form in every if slice_config.shared_bytes(form, case.rows, case.head_dim, 2) <= most]


def contenders(case):
    """Forms of every kernel that may win, for groups of 128 queries, the fastest of the plain kernel first."""
    plain = [SliceConfig(64, 3, 8, ahead=True), SliceConfig(32, 3, 8, ahead=True)]
    shapes = ((64, 5), (128, 3)) if case.head_dim == 128 else ((64, 5), (128, 3), (128, 5))
    by_warps = [SliceConfig(*shape, 4, by_warps=True, loose=loose) for shape in shapes for loose in (False, True)]
    return plain + by_warps


def tried(name, case, chosen):
    """``{form: what became of it}`` of each form in a process of its own, side by side; those that hang are ended."""
    command = [sys.executable, __file__, "--cases", name, "--try"]
    running = {}
    for i, form in enumerate(chosen):
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running[form] = subprocess.Popen([*command, str(i)], **given)
    found, end = {}, time.monotonic() + TRIAL_S
    for form, process in running.items():
        try:
            said = process.communicate(timeout=max(1, end - time.monotonic()))[0].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            said = "did not end"
        found[form] = said.splitlines()[-1] if said else f"status {process.returncode}"
    return found


def trial(case, form, device, dtype):
    """Print ``ok`` if a form is right: on few tokens, with lists that are empty, short, not whole steps, and long."""
    few = replace(case, tokens=1000)
    tensors = tokens(few, device, dtype)
    shares = torch.tensor([0.0, 0.001, 0.064, 0.3, 0.5, 0.77, 1.0, 0.1]).repeat(case.heads, 1)
    worst = 0.0
    for lists in (random_lists(few, shares, device), random_lists(few, shares, device, 16)):
        executor = Executor(lists.layout, device, form)
        for _ in range(3):
            out, lse = executor.attend(lists.tensors, *tensors, scale=case.head_dim**-0.5, with_lse=True)
            worst = max(worst, error_of(lists, tensors, out, lse, lists.layout.groups * case.heads))
    print("ok" if worst <= reference.TOLERANCE[dtype] else f"wrong by {worst:.1e}")


def compared_kernels(table, known):
    """Rows of `contenders` at every sparsity, in turns, those alone that are right; known: by what kernels depend on,
    what became of those of earlier cases."""
    name, case, device = table.name, table.case, table.device
    chosen = contenders(case)
    alike = replace(case, tokens=0)
    if alike not in known:
        begin = time.monotonic()
        known[alike] = tried(name, case, chosen)
        print(f"{name}: {len(chosen)} forms tried in {time.monotonic() - begin:.0f} s")
        for form, each in known[alike].items():
            if each != "ok":
                print(f"{name}: {short(form)}: {each}", flush=True)
    said = known[alike]
    tensors = tokens(case, device, torch.bfloat16)
    table.dense(tensors)
    left, shares = [form for form in chosen if said[form] == "ok"], uneven_shares(case)
    lists = [("even", sparsity, even_lists(case, sparsity, device)) for sparsity in (0.9, 0.7)]
    lists.append(("uneven", round(1 - float(shares.mean()), 3), random_lists(case, shares, device)))
    for what, sparsity, each in lists:
        us = {form: [] for form in left}
        # In turns, as the clock follows the power that is drawn.
        for form in left * TURNS:
            us[form].append(table.attend(what, form, each, tensors, with_lse=True, sparsity=sparsity))
        left = sorted(us, key=lambda form, us=us: sorted(us[form])[TURNS // 2])
    for sparsity in (0.5, 0.8):
        table.attend("even", left[0], even_lists(case, sparsity, device), tensors, with_lse=True, sparsity=sparsity)
    runs = random_lists(case, torch.full_like(shares, 1 - COMPARED), device, 64)
    table.attend(f"{case.rows}x64", left[0], runs, tensors, with_lse=True, sparsity=COMPARED)
    table.add("slices.dense again", table.time(lambda: slices.dense(*tensors)))
    return table.rows


def tokens(case, device, dtype):
    """Random q, k, v [1, H, N, D] as projections leave them, the heads of a token side by side."""
    made = [torch.randn(1, case.tokens, case.heads, case.head_dim, device=device, dtype=dtype) for _ in range(3)]
    return [x.transpose(1, 2) for x in made]


def even_lists(case, sparsity, device):
    """As many random keys for every group, the share ``1 - sparsity``."""
    groups, count = -(-case.tokens // case.rows), round((1 - sparsity) * case.tokens)
    heads = []
    for _ in range(case.heads):
        score = torch.rand(groups, case.tokens, device=device)
        heads.append(score.topk(count, sorted=False).indices.int().sort().values)
        del score
    keys = torch.stack(heads)[None]
    counts = torch.full(keys.shape[:3], count, dtype=torch.int32, device=device)
    return slices.from_indices(keys, counts, (case.tokens, case.tokens), rows=case.rows)


def random_lists(case, shares, device, width=1):
    """Runs of `width` keys at random, by the share of each group: shares [H, G]."""
    runs = -(-case.tokens // width)
    mask = torch.empty(1, *shares.shape, case.tokens, dtype=torch.bool, device=device)
    for h, share in enumerate(shares.to(device)):
        kept = torch.rand(len(share), runs, device=device) < share[:, None]
        mask[0, h] = kept.repeat_interleave(width, -1)[:, : case.tokens]
    return slices.from_mask(mask, case.tokens, rows=case.rows, width=width)


def uneven_shares(case):
    """Shares of keys [H, G], those of groups and of heads both uneven."""
    groups = -(-case.tokens // case.rows)
    low, high = GROUP_SHARES
    factor = torch.linspace(*HEAD_FACTORS, case.heads)[:, None]
    return ((low + (high - low) * torch.rand(case.heads, groups)) * factor).clamp(0.03, 1)


def error_of(lists, tensors, out, lse, groups=CHECKED_GROUPS):
    """Largest `reference.relative_error` and error of the log-sum-exps, over so many random groups."""
    q, k, v = tensors
    layout, worst = lists.layout, 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(groups):
        h, g = (int(torch.randint(n, (), generator=generator)) for n in (layout.heads, layout.groups))
        listed = lists.keys[0, h, g, : int(lists.counts[0, h, g])].long()
        if not len(listed):
            continue
        rows = slice(g * layout.rows, (g + 1) * layout.rows)
        scores = q[0, h, rows].double() @ k[0, h, listed].double().mT * q.shape[-1] ** -0.5
        right = scores.softmax(-1) @ v[0, h, listed].double()
        worst = max(worst, nan_to_inf(reference.relative_error(out[0, h, rows], right)))
        sums = (lse[0, h, rows].double() - scores.logsumexp(-1)).abs().max()
        worst = max(worst, nan_to_inf(float(sums)) if not sums <= 1e-3 else 0.0)
    return worst


def nan_to_inf(error):
    """A NaN is wrong, and `max` would lose it."""
    return float("inf") if error != error else float(error)


class Table:
    """The rows of a case; `dense_us`: of the fastest dense kernel."""

    def __init__(self, name, case, device, seconds):
        """Measure nothing yet."""
        self.name, self.case, self.device, self.seconds = name, case, device, seconds
        self.rows, self.dense_us = [], None

    def time(self, call):
        """Median microseconds."""
        timed = time_gpu if self.device.type == "cuda" else time_call
        return timed(call, min_reps=5, max_seconds=self.seconds, rse_target=0.002).p50_us

    def add(self, what, p50_us, flops=None, **columns):
        """Add and print a row."""
        row = {"case": self.name, "what": what, "p50_us": round(p50_us, 1), "status": "ok"}
        if flops:
            row["tflops"] = round(flops / p50_us / 1e6, 1)
        if self.dense_us and flops:
            row["over_dense"] = round(self.dense_us / p50_us, 3)
        self.rows.append(row | columns)
        print(" ".join(f"{self.rows[-1].get(column, ''):>10}" for column in SHOWN), flush=True)

    def dense(self, tensors):
        """Time torch's dense kernels."""
        case = self.case
        flops = 4 * case.heads * case.tokens**2 * case.head_dim
        times = []
        for backend in kernels.NAMES if tensors[0].is_cuda else ():
            try:
                kernels.need(backend, *tensors)
            except Unavailable as refusal:
                print(self.name, backend, refusal)
                continue
            times.append(self.time(lambda backend=backend: kernels.attend(backend, *tensors)))
            self.add(f"dense {backend}", times[-1], flops)
        times.append(self.time(lambda: slices.dense(*tensors)))
        self.add("slices.dense", times[-1], flops)
        self.dense_us = min(times)

    def attend(self, what, form, lists, tensors, with_lse=False, **columns):
        """Check and time a form of the kernel; return its time in microseconds, infinity where there is none."""
        executor = Executor(lists.layout, self.device, form)

        def call(with_lse=with_lse):
            return executor.attend(lists.tensors, *tensors, scale=self.case.head_dim**-0.5, with_lse=with_lse)

        try:
            out, lse = call(with_lse=True)
        except OutOfResources as refusal:
            print(self.name, short(form), refusal)
            return float("inf")
        error = error_of(lists, tensors, out, lse)
        flops = 4 * self.case.head_dim * self.case.tokens**2 * float(lists.density().double().sum())
        found = {"form": short(form), "error": f"{error:.1e}", **columns}
        if not error <= reference.TOLERANCE[out.dtype]:
            self.add(what, float("inf"), **found, status="wrong")
            return float("inf")
        p50_us = self.time(call)
        self.add(what, p50_us, flops, **found)
        return p50_us


def short(form):
    """A form in a word: keys a step, stages, warps; keys' numbers ahead, K as columns, rare rescales.

    Of the kernel by warps: keys a step, stages, l if it is loose.
    """
    if form.by_warps:
        return f"{form.step_keys}k{form.num_stages}s-warps{'-l' * form.loose}"
    levers = "a" * form.ahead + "c" * form.k_columns + "r" * (form.slack > 0)
    return f"{form.step_keys}k{form.num_stages}s{form.num_warps}w{levers}"


def measure(table, which, dtype, fastest):
    """All rows of a case. fastest: forms by head dim and rows, of earlier cases, to which this one is added."""
    case, device = table.case, table.device
    tensors = tokens(case, device, dtype)
    table.dense(tensors)
    alike = case.head_dim, case.rows
    if alike not in fastest:
        fastest[alike] = compared(table, which, tensors)
    best = fastest[alike]
    around(table, best, tensors)
    for sparsity in SPARSITIES:
        table.attend("even", best, even_lists(case, sparsity, device), tensors, sparsity=sparsity)
    shares = uneven_shares(case)
    mean = float(shares.mean())
    for what, each in (("uneven", shares), ("even, alike", torch.full_like(shares, mean))):
        table.attend(what, best, random_lists(case, each, device), tensors, sparsity=round(1 - mean, 3))
    for width in WIDTHS:
        lists = random_lists(case, torch.full_like(shares, 1 - COMPARED), device, width)
        table.attend(f"{case.rows}x{width}", best, lists, tensors, sparsity=COMPARED)
    # Whether the clock is what it was at the beginning.
    table.add("slices.dense again", table.time(lambda: slices.dense(*tensors)))


def compared(table, which, tensors):
    """The fastest form on even lists."""
    case = table.case
    lists = even_lists(case, COMPARED, table.device)
    chosen = slice_config.for_slices(case.rows, case.head_dim, tensors[0].dtype, *device_facts(table.device))
    candidates = [chosen] if which == "chosen" else [chosen, *(form for form in forms(case) if form != chosen)]
    candidates = candidates[:4] if case is TINY else candidates
    # With log-sum-exps, as they are checked: each form is compiled once.
    times = {form: table.attend("forms", form, lists, tensors, with_lse=True, sparsity=COMPARED) for form in candidates}
    best = min(times, key=times.get)
    in_one_piece = [x.contiguous() for x in tensors]
    table.attend("contiguous", best, lists, in_one_piece, sparsity=COMPARED)
    return best


def around(table, form, tensors):
    """What comes with attention: log-sum-exps, the host's time, and lists made, packed and unpacked."""
    case, device = table.case, table.device
    lists = even_lists(case, COMPARED, device)
    executor = Executor(lists.layout, device, form)
    scale = case.head_dim**-0.5
    with_lse = table.time(lambda: executor.attend(lists.tensors, *tensors, scale=scale, with_lse=True))
    table.add("with lse", with_lse, form=short(form), sparsity=COMPARED)
    if device.type == "cuda":
        effort = {"min_reps": 20, "max_seconds": table.seconds, "rse_target": 0.01}
        table.add("host of attend", time_host(lambda: slices.attend(*tensors, lists), **effort)[1])
    bits = lists.pack()
    table.add("pack", table.time(lists.pack))
    table.add("unpack", table.time(lambda: slices.unpack(bits, lists.layout)))
    mask = torch.rand(1, case.heads, lists.layout.groups, case.tokens, device=device) < 1 - COMPARED
    table.add("from_mask", table.time(lambda: slices.from_mask(mask, case.tokens, rows=case.rows)))


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Forms of the slice kernel on this GPU")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES)[:3])
    parser.add_argument(
        "--forms", choices=("all", "chosen"), default="all", help="compared, or the configured one alone"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="most that one timing takes")
    parser.add_argument("--kernels", action="store_true", help="the forms of every kernel that may win, alone")
    parser.add_argument("--try", dest="trial", type=int, help="the number of one of those forms: try it, time nothing")
    parser.add_argument("--tiny", action="store_true", help="300 tokens, to see whether it runs")
    parser.add_argument("--output", type=Path, help="CSV of all rows")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda":
        if not given.tiny or given.kernels:
            parser.error("expected a GPU, found none; --tiny runs without one")
        # The interpreter stands in for the GPU.
        operators.EXECUTORS["cpu"] = Executor.__module__
    # The interpreter's bfloat16 is not right in every release.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    cases = {"tiny": TINY} if given.tiny else {name: CASES[name] for name in given.cases}
    rows, fastest = [], {}
    for name, case in cases.items():
        if given.trial is not None:
            with torch.inference_mode():
                trial(case, contenders(case)[given.trial], device, dtype)
            return
        if given.kernels:
            with torch.inference_mode():
                rows += compared_kernels(Table(name, case, device, given.seconds), fastest)
            continue
        table = Table(name, case, device, given.seconds)
        with torch.inference_mode():
            measure(table, given.forms, dtype, fastest)
        rows += table.rows
    frame = pd.DataFrame(rows).reindex(columns=SHOWN)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(given.output, index=False)
    if given.kernels:
        print(
            frame[frame.form.notna()]
            .pivot_table("over_dense", ["case", "form"], ["what", "sparsity"], "median")
            .to_string()
        )
        return
    best = frame[frame.what == "forms"].sort_values("p50_us").groupby("case").head(5)
    print(pd.concat([best, frame[frame.what != "forms"]]).to_string(index=False, na_rep=""))


if __name__ == "__main__":
    main()
