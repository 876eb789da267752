"""Patterns by head side by side: all heads with patterns of their own against one shared pattern of equal work.

Head h sees windows around each token of a square grid whose sides are joined, moved h steps aside: every pattern has as
many pairs as any other, and no two are equal. Results, and gradients where the device has them, are compared with a
float64 reference before anything is timed. Contenders are timed in turns in one run: one pattern that all heads share,
one plan of all patterns, and a plan for each head, called one after the other. `ratio` is to the shared pattern.

Last, a mask_mod of windows is compressed to a pattern where the device is, and checked against the same windows made
without it: seconds, and the peak of memory beyond what was held before.

    python benchmarks/heads.py --device cuda
    python benchmarks/heads.py --device cpu --side 32 --window 7 --mask-side 64
"""

import argparse
import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import tilewright
from tilewright import graph, patterns, reference, targets
from tilewright.core.timing import Checked
from tilewright.core.turns import time_in_turns
from tilewright.study.experiments._checks import judging

# Of gradients: they sum products of four rounded factors where the result sums those of two.
GRADIENT = 2


def main():
    """Compare, time, print and write."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=targets.NAMES)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--side", type=int, help="tokens on a side of the grid; default: 128 on a GPU, 32 on a CPU")
    parser.add_argument("--window", type=int, default=None, help="odd; default: 15 on a GPU, 7 on a CPU")
    parser.add_argument("--mask-side", type=int, default=256, help="side of the grid of the mask_mod; 0 for none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, for each number")
    parser.add_argument("--output", type=Path, default=Path("results/logs/heads.csv"))
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.dtype = getattr(torch, arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    arguments.side = arguments.side or (128 if on_gpu else 32)
    arguments.window = arguments.window or (15 if on_gpu else 7)
    if arguments.window % 2 == 0 or arguments.window > arguments.side:
        parser.error(f"--window: expected an odd number up to the side, {arguments.side}, found {arguments.window}")
    found = pd.DataFrame(compared(arguments))
    if arguments.mask_side:
        found = pd.concat([found, pd.DataFrame([compressed(arguments)])])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    found.to_csv(arguments.output, index=False)
    print(found.to_string(index=False, float_format="{:.4g}".format, na_rep=""))


def windows(side, window, moved=0):
    """The `Graph` of windows on a grid with joined sides, `moved` tokens aside: each row has ``window**2`` keys."""
    y, x = np.divmod(np.arange(side * side), side)
    reach = np.arange(window) - window // 2
    rows = (y[:, None, None] + reach[:, None]) % side
    keys = (rows * side + (x[:, None, None] + reach + moved) % side).reshape(side * side, -1)
    indptr = np.arange(side * side + 1) * window**2
    return graph.from_csr(indptr, np.sort(keys, 1).ravel(), (side * side, side * side))


def compared(arguments):
    """Rows of the three contenders. Raises `SystemExit` for a wrong one."""
    heads, side = arguments.heads, arguments.side
    one = windows(side, arguments.window)
    several = [windows(side, arguments.window, 2 * h) for h in range(heads)]
    assert {each.entries for each in several} == {one.entries}
    assert len({each.id for each in several}) == heads
    options = {"head_dim": arguments.head_dim, "dtype": arguments.dtype, "device": arguments.device}
    shared = tilewright.plan(one, heads=heads, **options)
    own = tilewright.plan(several, heads=heads, **options)
    each = [tilewright.plan(pattern, heads=1, **options) for pattern in several]

    def apart(q, k, v):
        return torch.cat([plan(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for h, plan in enumerate(each)], 1)

    make = torch.Generator().manual_seed(0)
    shape = arguments.batch, heads, side * side, arguments.head_dim
    *tokens, grad = (torch.randn(shape, generator=make).to(arguments.device, arguments.dtype) for _ in range(4))
    differentiated = targets.differentiates_units(arguments.device)
    contenders = {
        "one shared pattern": (shared, [one] * heads),
        f"{heads} patterns, one plan": (own, several),
        f"{heads} patterns, {heads} plans": (apart, several),
    }
    rows, calls = [], []
    for name, (attend, graphs) in contenders.items():
        errors = checked(attend, graphs, tokens, grad if differentiated else None)
        rows.append({"contender": name, "tokens": side * side, "pairs": one.entries, **errors})
        calls.append(as_first(partial(without_gradients, attend, tokens)))
        if differentiated:
            calls.append(as_first(partial(with_gradients, attend, tokens, grad)))
    effort = {"min_reps": 10, "max_seconds": arguments.seconds, "rse_target": 0.01}
    times = time_in_turns(calls, gpu=arguments.device == "cuda", **effort)
    if wrong := next((call.wrong for call in calls if call.wrong), ""):
        raise SystemExit(wrong)
    step = len(calls) // len(rows)
    for number, row in enumerate(rows):
        forward, *both = times[number * step : (number + 1) * step]
        row |= {"forward_us": forward.p50_us, "ratio": forward.p50_us / times[0].p50_us, "rse": forward.rse}
        if both:
            row |= {"both_us": both[0].p50_us, "both_ratio": both[0].p50_us / times[1].p50_us}
    return rows


def as_first(call):
    """A call whose results, where they are timed, are those of a call now, which was compared."""
    first = call()
    first = first if isinstance(first, tuple) else (first,)

    def judge(found):
        found = found if isinstance(found, tuple) else (found,)
        off = max(float((x - y).norm() / y.norm()) for x, y in zip(found, first, strict=True))
        return "" if off <= reference.TOLERANCE[first[0].dtype] else f"wrong: when it was timed, off by {off:.2g}"

    return Checked(call, judging(judge))


def without_gradients(attend, tokens):
    """The result alone."""
    with torch.no_grad():
        return attend(*tokens)


def with_gradients(attend, tokens, grad):
    """Gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tokens]
    return torch.autograd.grad(attend(*leaves), leaves, grad)


def checked(attend, graphs, tokens, grad):
    """Errors against masked attention in float64, one head at a time. Raises `SystemExit` where one is too large."""
    found = [without_gradients(attend, tokens), *(() if grad is None else with_gradients(attend, tokens, grad))]
    names, worst = ("error", "error_dq", "error_dk", "error_dv"), [0.0] * len(found)
    for h, pattern in enumerate(graphs):
        leaves = [x[:, h : h + 1].double().requires_grad_() for x in tokens]
        wanted = []
        # Some queries at a time.
        for lo in range(0, pattern.n_rows, 1024):
            at = slice(lo, min(lo + 1024, pattern.n_rows))
            indptr, keys = graph.take_rows(pattern.indptr, pattern.indices, pattern.row_id[at])
            allowed = torch.zeros(at.stop - lo, pattern.n_cols, dtype=torch.bool)
            allowed[np.repeat(np.arange(len(allowed)), np.diff(indptr)), keys.astype(np.int64)] = True
            q, k, v = leaves[0][:, :, at], *leaves[1:]
            scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed.to(q.device), -torch.inf)
            part = torch.softmax(scores, -1) @ v
            wanted.append(part.detach())
            if grad is not None:
                part.backward(grad[:, h : h + 1, at].double())
        wanted = [torch.cat(wanted, 2), *(x.grad for x in leaves)]
        for i, x in enumerate(found):
            error = (x[:, h : h + 1].double() - wanted[i]).norm() / wanted[i].norm()
            worst[i] = max(worst[i], float(error))
    for i, (name, error) in enumerate(zip(names[: len(found)], worst, strict=True)):
        most = reference.TOLERANCE[tokens[0].dtype] * (GRADIENT if i else 1)
        if not error <= most:
            raise SystemExit(f"wrong: {name} {error:.2e}, expected at most {most:.0e}")
    return dict(zip(names, worst, strict=False))


def compressed(arguments):
    """The row of a mask_mod of windows that is compressed. Raises `SystemExit` where the pattern is another one."""
    side, reach, gpu = arguments.mask_side, min(arguments.window, arguments.mask_side) // 2, arguments.device == "cuda"
    # One more token, which sees all and is seen by all.
    n = side * side + 1

    def mask_mod(b, h, q_idx, kv_idx):
        near_y = (q_idx // side - kv_idx // side).abs() <= reach
        near_x = (q_idx % side - kv_idx % side).abs() <= reach
        return (near_y & near_x) | (q_idx == n - 1) | (kv_idx == n - 1)

    # The first call on a device loads what it needs.
    patterns.read(mask_mod, heads=1, kind=arguments.device, shape=(n, 9))
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    (found,), _ = patterns.read(mask_mod, heads=1, kind=arguments.device, shape=(n, n))
    seconds = time.perf_counter() - begin
    if gpu:
        peak_mb = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    expected = bounded(side, reach)
    if found.id != expected.id:
        raise SystemExit(f"wrong: the mask_mod's pattern has {found.entries} pairs, expected {expected.entries}")
    return {"contender": "mask_mod to pattern", "tokens": n, "pairs": found.entries, "seconds": seconds,
            "peak_mb": peak_mb}  # fmt: skip


def bounded(side, reach):
    """The `Graph` of windows that end at the sides of the grid, and of a last token that sees all and all see."""
    n, y = side * side, np.arange(side)
    lo, hi = np.maximum(y - reach, 0), np.minimum(y + reach, side - 1) + 1
    rows = [
        np.append((np.arange(lo[i], hi[i])[:, None] * side + np.arange(lo[j], hi[j])).ravel(), n)
        for i in range(side)
        for j in range(side)
    ]
    rows.append(np.arange(n + 1))
    indptr = np.concatenate(([0], np.cumsum([len(keys) for keys in rows])))
    return graph.from_csr(indptr, np.concatenate(rows), (n + 1, n + 1))


if __name__ == "__main__":
    main()
