"""What planning takes: seconds of `tilewright.plan` for a new pattern, and of its stages up to the blocks.

Patterns are those of `bench_orders`, as SciPy matrices; `+1` has a global token, `shuffled` its tokens in any order.
Each stage is called by itself, then the whole plan; the least of the repetitions is stated, wall clock and processor.
What is compiled or calibrated once is so before: `tilewright compile` and a small plan come first.

    python benchmarks/bench_plan.py --patterns "128x128+1,256x256+1 shuffled" --orders auto --device cpu
"""

import argparse
import os
import time
from pathlib import Path

import pandas as pd
import torch
from bench_orders import GRIDS, windows

import tilewright as tw
from tilewright import blocks, reorder, targets
from tilewright.blocks import tiles
from tilewright.commands import compile as compiling
from tilewright.graph import from_pattern

PATTERNS = "128x128+1,128x128+1 shuffled,256x256+1,256x256+1 shuffled"
KNOWN = GRIDS | {"256x256+1": {"sides": (256, 256), "reach": (7, 7), "n_global": 1}}


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Seconds that plans take")
    parser.add_argument("--patterns", default=PATTERNS, help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--orders", default="auto", help="e.g. auto,none,ic,hc")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/logs/bench_plan.csv"))
    given = parser.parse_args()
    compiling.ahead()
    options = {"heads": 6, "head_dim": 64, "dtype": getattr(torch, given.dtype), "device": given.device}
    tw.plan(windows((40, 40), (3, 3), n_global=1, seed=0), **options)
    rows = []
    for name in given.patterns.split(","):
        pattern = windows(**KNOWN[name])
        for order in given.orders.split(","):
            rows.append({"pattern": name, "order": order, **measured(pattern, order, options, given)})
            print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1), flush=True)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(given.output, index=False)


def measured(pattern, order, options, given):
    """The columns of one row, seconds."""
    columns, known = {}, [tiles.parse(name) for name in targets.facts(given.device).TILES]

    def timed(what, call):
        for _ in range(given.repetitions):
            begin = time.perf_counter(), time.process_time()
            result = call()
            wall, processor = time.perf_counter() - begin[0], time.process_time() - begin[1]
            columns[f"{what}_s"] = min(wall, columns.get(f"{what}_s", wall))
            columns[f"{what}_cpu_s"] = min(processor, columns.get(f"{what}_cpu_s", processor))
        return result

    graph = timed("graph", lambda: from_pattern(pattern))
    ordered = timed("order", lambda: reorder.apply(graph, "ic" if order == "auto" else order)[0])
    timed("blocks", lambda: blocks.extract_all(ordered, known))
    plan = timed("plan", lambda: tw.plan(pattern, reorder=order, **options))
    return columns | {"chosen": plan.reorder["order"], "load": os.getloadavg()[0]}


if __name__ == "__main__":
    main()
