"""Windowed attention on push memories: keys and cycles, and what the same layer takes on processors.

Windowed attention on push memories: cycles beside those of the sums alone, and words that come in from outside. The
array holds queries in its processing elements and streams keys and values by; what reads them again and again in
gathered form comes in once here.
"""

from pathlib import Path

import numpy as np

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "tokens": ("tokens", ",.0f"),
    "heads": ("heads", ",.0f"),
    "tiles": ("tiles", ",.0f"),
    "delivered": ("keys delivered", ",.0f"),
    "wrong": ("wrong", ",.0f"),
    "cycles_global": ("cycles", ",.0f"),
    "bound": ("cycles of the sums alone", ",.0f"),
    "ms": ("ms at 900 MHz", ".3f"),
    "words": ("words from outside", ",.0f"),
    "gathered": ("words, gathered", ",.0f"),
    "error": ("relative error", ".1e"),
    "here_ms": ("ms, this device", ".3f"),
    "here": ("this device", ""),
    "gpu_ms": ("ms, recorded GPU", ".4f"),
    "gpu": ("recorded GPU", ""),
    "reason": ("why blank", ""),
}
# A recorded run of the same layers.
RECORDED = "expected/h200/attention.csv"


def needs(config):
    """The experiment's files, the layers as the study times them, and as they were recorded on a GPU."""
    files = _select.logs(config, "push_attention")
    if not files:
        return []
    workloads = list(config.push.attention)
    timed = _select.attention_of_method(config, [name for name in workloads if name in config.workloads])
    recorded = Path(__file__).parents[4] / RECORDED
    return [*files, *timed, *([RECORDED] if recorded.is_file() else [])]


def table(inputs):
    """One row per workload. ms: the array's, of all heads, tokens already there and without projections. here_ms,
    gpu_ms: the fastest schedule of the layer, all heads, tokens in plan order, likewise without projections; of a GPU's
    the headline's. Missing where the layer was not timed."""
    found, timed = _read.frames(inputs, "push_attention", "attention", optional=["attention"], apart=True)
    timed = timed[(timed["provider"] == "tilewright") & timed["p50_us"].notna()] if len(timed) else timed
    for column, name, on_gpu in (("here_ms", "here", False), ("gpu_ms", "gpu", True)):
        found[column], found[name] = np.nan, ""
        for at, model in found["model"].items():
            own = timed[timed["model"] == model] if len(timed) else timed
            own = own[own["device"].str.contains("NVIDIA") == on_gpu] if len(own) else own
            own = _read.headline(own) if on_gpu and len(own) else own
            if len(own):
                best = own.loc[own["p50_us"].idxmin()]
                found.loc[at, [column, name]] = best["p50_us"] / 1e3, best["device"]
    return found
