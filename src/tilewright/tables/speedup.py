"""Best plan against dense SDPA per workload, beside the paper's best against FlashAttention and the peers' own."""

from tilewright.tables import read, select

SHOWN = {
    "model": ("workload", ""),
    "tokens": ("tokens", ",.0f"),
    "density": ("density", ".3f"),
    "dense_us": ("dense SDPA p50 (µs)", ",.0f"),
    "plan_us": ("best plan p50 (µs)", ",.0f"),
    "plan": ("best plan", ""),
    "speedup": ("× dense, measured", ".2f"),
    "paper_speedup": ("× FlashAttention, paper", ".2f"),
    "sdpa_mask": ("masked SDPA, × dense", ".2f"),
    "flex": ("FlexAttention, × dense", ".2f"),
    "peer": ("fastest peer", ""),
    "peer_us": ("its p50 (µs)", ",.0f"),
    "over_peer": ("× fastest peer", ".2f"),
    "device": ("device", ""),
    "reason": ("why blank", ""),
}


def needs(config):
    """Every bench file, and the paper's bars."""
    files = select.bench(config, config.workloads)
    return [*files, select.PAPER_LATENCY] if files else []


def table(inputs):
    """One row per workload, by family and resolution; ``reason`` gathers why peers or plans are missing."""
    import pandas as pd

    rows, paper = read.frames(inputs, "bench", "paper_latency")
    rows, paper = read.bench(rows), read.paper_speedups(paper)
    best_of_paper = paper[paper["provider"] == "pipeline"].groupby(["family", "resolution"])["speedup"].max()
    result = []
    for model, group in rows.groupby("model", sort=False):
        family, resolution = group[["family", "resolution"]].iloc[0]
        timed = read.plans(group).dropna(subset="p50_us")
        best = timed.loc[timed["p50_us"].idxmin()] if len(timed) else None
        peers = group.groupby("provider")["speedup"].max()
        others = group[group["provider"] != "tilewright"].dropna(subset="p50_us")
        peer = others.loc[others["p50_us"].idxmin()] if len(others) else None
        blank = group[(group["status"] != "ok") & group["reason"].ne("")]
        result.append(
            {
                "family": family,
                "resolution": resolution,
                "model": model,
                "tokens": group["tokens"].max(),
                "density": group["density"].max(),
                "dense_us": group["dense_us"].max(),
                "plan_us": None if best is None else best["p50_us"],
                "plan": "" if best is None else f"{best['reorder']} + {best['solver']} ({best['tiles']})",
                "speedup": None if best is None else best["speedup"],
                "paper_speedup": best_of_paper.get((family, resolution)),
                "sdpa_mask": peers.get("sdpa_mask"),
                "flex": peers.get("flex"),
                "peer": "" if peer is None else f"{peer['provider']} ({peer['reorder'] or 'none'})",
                "peer_us": None if peer is None else peer["p50_us"],
                "over_peer": None if peer is None or best is None else peer["p50_us"] / best["p50_us"],
                "device": read.devices(group),
                "reason": "; ".join(sorted({f"{r.provider}: {r.reason}" for r in blank.itertuples()})),
            }
        )
    frame = pd.DataFrame(result)
    numbers = ["plan_us", "speedup", "paper_speedup", "sdpa_mask", "flex", "peer_us", "over_peer"]
    return frame.astype(dict.fromkeys(numbers, float))
