"""Joint attention of CogVideoX and HunyuanVideo by slice lists on this GPU: checked, timed, and as a short table.

For each case: torch's fastest dense kernel; lists that are given, predicted, and both; the queries of text by
themselves. Some rows are compared with float64 before anything is timed, among them some of text, whose padding nobody
may see. Times are medians of CUDA graph replays, all of one run; a call that waits for the device is an error.

    python benchmarks/slices_text.py --output results/logs/slices_text.csv
    python benchmarks/slices_text.py --tiny        no GPU: whether it runs at all
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tilewright import reference, slices
from tilewright.core.timing import time_call, time_gpu, time_host
from tilewright.study.experiments.slices import MODELS, sizes, text

# The share of keys that lists hold, and tokens of text that pad the prompt behind a video.
KEEPS, PADDING = (0.3, 0.2, 0.1), 156
TINY = {"tiny-first": "2x64-21-2x6x16", "tiny-last": "2x64-2x6x16-30"}
# Heads, and queries of each, whose results are checked.
HEADS, QUERIES = 2, 24


def tokens(n, heads, head_dim, device, dtype):
    """q, k and v [1, H, N, D] as projections leave them: neighbours are alike, and want some keys more than others."""
    # Scores stay near those that `reference.TOLERANCE` is derived for.
    centres = torch.randn(16, heads, head_dim, device=device) * 0.7
    near = centres[torch.arange(n, device=device) // 64 % 16]
    made = [(near + torch.randn(n, heads, head_dim, device=device)).to(dtype)[None] for _ in range(3)]
    return [x.transpose(1, 2) for x in made]


def checked(lists, q, k, v, rows):
    """Largest relative error of some rows of some heads. Raises `AssertionError` beyond the tolerance of the type."""
    lists.check()
    out, lse = slices.attend(q, k, v, lists, lse=True)
    worst = 0.0
    for h in range(HEADS):
        one = np.s_[:, h : h + 1]
        right = reference.attention_rows(lists.graph(0, h), rows, q[one].cpu(), k[one].cpu(), v[one].cpu())
        worst = max(worst, reference.relative_error(out[one][:, :, rows].cpu(), right))
    assert worst <= reference.TOLERANCE[q.dtype], f"relative error {worst:.1e}"
    assert lse.isfinite().all() and not out.isnan().any()
    return worst


def measured(case, name, device, dtype, seconds):
    """Rows of one case."""
    heads, head_dim, grid = sizes(name)
    first, last = text(name)
    n = int(np.prod(grid)) + first + last
    q, k, v = tokens(n, heads, head_dim, device, dtype)
    length = n - min(last, PADDING) // 2 if last else None
    lengths = None if length is None else torch.tensor([length], dtype=torch.int32, device=device)
    if length is not None:
        # A key that nobody may see: any result that does would be far off.
        k[:, :, length:], v[:, :, length:] = 30, 1e3
    drawn = np.random.default_rng(0).choice(n, QUERIES)
    rows = np.unique(np.concatenate([drawn, [0, first, n - last - 1, n - 1]]))
    timed = time_gpu if device.type == "cuda" else time_call

    def time(call):
        return timed(call, min_reps=5, max_seconds=seconds, rse_target=0.002).p50_us

    queries = q[:, :, :first] if first else q[:, :, n - last :]
    dense_us = time(lambda: slices.dense(q, k, v))
    found = [
        {"what": "dense", "keep": 1.0, "p50_us": dense_us},
        {"what": "text alone", "keep": 1.0, "p50_us": time(lambda: slices.dense(queries, k, v, lengths=lengths))},
    ]
    for keep in KEEPS:
        how = {"keep": keep, "budget": keep, "text": (first, last), "lengths": lengths}
        lists = slices.predict(q, k, pool=128, **how)
        error = checked(lists, q, k, v, rows)
        calls = {
            "attend": lambda lists=lists: slices.attend(q, k, v, lists),
            "predict": lambda how=how: slices.predict(q, k, pool=128, **how),
            "both": lambda how=how: slices.attend(q, k, v, slices.predict(q, k, pool=128, **how)),
        }
        for what, call in calls.items():
            facts = {"density": float(lists.density().mean()), "relative_error": error}
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
                call()
                torch.cuda.set_sync_debug_mode("default")
                _, facts["host_us"] = time_host(call, min_reps=5, max_seconds=seconds, rse_target=0.05)
            found.append({"what": what, "keep": keep, "p50_us": time(call), **facts})
    return [{"case": case, "tokens": n, **row, "speedup": dense_us / row["p50_us"]} for row in found]


def main():
    """Print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=0.5, help="of a timing, at most")
    parser.add_argument("--tiny", action="store_true", help="small cases in float16, without a GPU")
    parser.add_argument("--output", type=Path, help="CSV of all rows")
    args = parser.parse_args()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float16 if args.tiny else torch.bfloat16
    cases = TINY if args.tiny else {name: MODELS[name] for name in args.cases}
    torch.manual_seed(0)
    found = []
    with torch.no_grad():
        for case, name in cases.items():
            found += measured(case, name, device, dtype, 0.01 if args.tiny else args.seconds)
            if args.output:
                pd.DataFrame(found).to_csv(args.output, index=False)
    print(pd.DataFrame(found).to_string(index=False, float_format="{:,.3g}".format))


if __name__ == "__main__":
    main()
