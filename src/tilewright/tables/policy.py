"""What the ILP gains on the greedy policy, predicted and measured, per workload, order and tile set run under both."""

from tilewright.tables import read, select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "predicted_us_greedy": ("greedy predicted (µs)", ",.0f"),
    "predicted_us_ilp": ("ILP predicted (µs)", ",.0f"),
    "predicted_gain": ("predicted gain", "+.1%"),
    "p50_us_greedy": ("greedy p50 (µs)", ",.0f"),
    "p50_us_ilp": ("ILP p50 (µs)", ",.0f"),
    "measured_gain": ("measured gain", "+.1%"),
    "paper_gain": ("paper's gain", "+.1%"),
}


def needs(config):
    """Bench files of the tile set that policies are compared on, and the paper's bars; none without an ILP solver
    or a workload."""
    _, solvers = select.method(config)
    if not {"greedy"} < set(solvers) or not config.workloads:
        return []
    return [*select.bench_of_method(config, config.workloads), select.PAPER_LATENCY]


def table(inputs):
    """One row per pair; a gain is ``1 - ILP / greedy`` of predicted or p50 latency, tokens being in plan order."""
    rows, paper = read.frames(inputs, "bench", "paper_latency")
    rows = read.plans(read.bench(rows))
    key = ["family", "resolution", "model", "reorder", "tiles"]
    values = ["predicted_us", "p50_us"]
    greedy = rows[rows["policy"] == "greedy"][[*key, *values]]
    ilp = rows[rows["policy"] == "ilp"][[*key, "solver", *values]]
    frame = greedy.merge(ilp, on=key, suffixes=("_greedy", "_ilp"))
    frame["predicted_gain"] = 1 - frame["predicted_us_ilp"] / frame["predicted_us_greedy"]
    frame["measured_gain"] = 1 - frame["p50_us_ilp"] / frame["p50_us_greedy"]
    bars = paper[paper["provider"] == "pipeline"]
    bars = bars.pivot(index=["family", "resolution", "reorder"], columns="policy", values="latency_ms")
    gain = (1 - bars["ilp"] / bars["greedy"]).rename("paper_gain")
    return frame.join(gain, on=["family", "resolution", "reorder"])
