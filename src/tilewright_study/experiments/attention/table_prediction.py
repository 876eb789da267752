"""Predicted against measured latency of every schedule that ran, and the relative error of the prediction.

Predicted against measured latency of every schedule that ran with its tokens in plan order. The prediction comes from
the profile alone: for each round the longest item or the load shared by the lanes, plus the round's launches. On the
line the two agree. The band is ±30 %.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tiles": ("tiles", ""),
    "solver": ("solver", ""),
    "predicted_us": ("predicted (µs)", ",.0f"),
    "p50_us": ("measured p50 (µs)", ",.0f"),
    "error": ("predicted / measured − 1", "+.1%"),
}


def needs(config):
    """Every bench file."""
    return _select.attention(config, config.workloads)


def table(inputs):
    """One row per schedule timed with its tokens in plan order: the prediction is of that run, without permutations."""
    (rows,) = _read.frames(inputs, "attention")
    rows = _read.plans(_read.bench(rows)).dropna(subset=["p50_us", "predicted_us"]).reset_index(drop=True)
    columns = [
        "family",
        "resolution",
        "model",
        "reorder",
        "tiles",
        "solver",
        "policy",
        "predicted_us",
        "p50_us",
    ]
    return rows[columns].assign(error=rows["predicted_us"] / rows["p50_us"] - 1)
