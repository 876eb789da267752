"""Latency of every provider and plan, with its check: one row per workload, order, tile set and solver.

Every bench row of the run: provider, order, tile set and solver, p50 with p20 and p80, speed-up over the fastest dense
attention of the same run, the prediction, and the relative error of the check that preceded the timing beside its
tolerance. "Tokens in plan order" says whether the permutation of the tokens is outside the timing (as in a network) or
part of it. A row that did not run has no time and says why. The paper's milliseconds are of an A100 and whole networks.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "case": ("case", ""),
    "provider": ("provider", ""),
    "variant": ("form", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "ordered": ("tokens in plan order", ""),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.0f"),
    "p20_us": ("p20 (µs)", ",.0f"),
    "p80_us": ("p80 (µs)", ",.0f"),
    "cold_us": ("cold L2 (µs)", ",.0f"),
    "speedup": ("× dense", ".2f"),
    "dense": ("dense by", ""),
    "predicted_us": ("predicted (µs)", ",.0f"),
    "relative_error": ("relative error", ".1e"),
    "checked_rows": ("rows checked", ",.0f"),
    "tolerance": ("tolerance", ".1e"),
    "paper_ms": ("paper, A100 (ms)", ".2f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """Every bench file, and the paper's bars."""
    files = _select.attention(config, config.workloads)
    return [*files, _select.PAPER_LATENCY] if files else []


def table(inputs):
    """All bench rows, with their speed-up over the fastest dense attention, and the paper's time where there is one."""
    rows, paper = _read.frames(inputs, "attention", "paper_latency")
    rows = _read.bench(rows)
    paper = _read.paper_speedups(paper).rename(columns={"latency_ms": "paper_ms", "speedup": "paper_speedup"})
    paper["provider"] = paper["provider"].map({"flash_attention": "sdpa_dense", "pipeline": "tilewright"})
    key = ["family", "resolution", "provider", "reorder", "policy"]
    rows = rows.merge(paper[[*key, "paper_ms", "paper_speedup"]], on=key, how="left", validate="many_to_one")
    rows["case"] = rows["model"].map(_select.case)
    rows["ordered"] = rows["ordered"].map({True: "yes", False: "no"})
    return rows
