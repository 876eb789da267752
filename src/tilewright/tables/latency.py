"""Latency of every provider and plan, with its check: one row per workload, order, tile set and solver.

The paper's own time (A100, whole network) stands beside the row that it corresponds to; devices and scope differ, so
only ratios compare (see the ``speedup`` table).
"""

from tilewright.tables import read, select

SHOWN = {
    "model": ("workload", ""),
    "provider": ("provider", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "ordered": ("tokens in plan order", ""),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.0f"),
    "p20_us": ("p20 (µs)", ",.0f"),
    "p80_us": ("p80 (µs)", ",.0f"),
    "speedup": ("× dense SDPA", ".2f"),
    "predicted_us": ("predicted (µs)", ",.0f"),
    "max_abs_error": ("max error", ".1e"),
    "tolerance": ("tolerance", ".1e"),
    "paper_ms": ("paper, A100 (ms)", ".2f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """Every bench file, and the paper's bars."""
    files = select.bench(config, config.workloads)
    return [*files, select.PAPER_LATENCY] if files else []


def table(inputs):
    """All bench rows, each with its speed-up over dense SDPA and the paper's time where there is one."""
    rows, paper = read.frames(inputs, "bench", "paper_latency")
    rows = read.bench(rows)
    paper = read.paper_speedups(paper).rename(columns={"latency_ms": "paper_ms", "speedup": "paper_speedup"})
    paper["provider"] = paper["provider"].map({"flash_attention": "sdpa_dense", "pipeline": "tilewright"})
    key = ["family", "resolution", "provider", "reorder", "policy"]
    rows = rows.merge(paper[[*key, "paper_ms", "paper_speedup"]], on=key, how="left", validate="many_to_one")
    rows["ordered"] = rows["ordered"].map({True: "yes", False: "no"}).where(rows["provider"] == "tilewright", "")
    return rows
