"""Neighbourhood attention of one layer: its time by Tilewright and by others, by grid and window.

Neighbourhood attention of one layer, one image: the time of Tilewright and of what computes the same, each in its
fastest form that was tried. Dense attention computes something else, and stands beside them. Every result was compared
with float64 on some hundred queries first. On a GPU times are of replayed CUDA graphs; what orders tokens for a
contender, and what it prepares once for a grid, is not in its time.
"""

import numpy as np

from tilewright_study.tables import _read, _select

OURS = "tilewright"
DENSE = "sdpa_dense"
TIMES = ["p20_us", "p50_us", "p80_us", "rse", "useful_gflops", "latency_us", "host_us"]
LAYER = ["device", "dtype", "case"]

SHOWN = {
    "grid": ("grid", ""),
    "window": ("window", ""),
    "heads": ("heads", ".0f"),
    "head_dim": ("head dim", ".0f"),
    "tokens": ("tokens", ",.0f"),
    "provider": ("provider", ""),
    "variant": ("form", ""),
    "box": ("box", ""),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.1f"),
    "over_ours": ("× ours", ".2f"),
    "useful_gflops": ("useful GFLOP/s", ",.0f"),
    "fill": ("fill", ".3f"),
    "host_us": ("host, a call (µs)", ",.1f"),
    "plan_us": ("planned in (µs)", ",.0f"),
    "relative_error": ("relative error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each layer."""
    return _select.logs(config, "neighborhood")


def rows(inputs):
    """All rows, without times where a check failed, by axes and tokens; ``fill``: pairs over those computed."""
    (frame,) = _read.frames(inputs, "neighborhood")
    frame.loc[frame["status"] != "ok", TIMES] = np.nan
    frame["fill"] = frame["pairs"] / frame["visited"]
    return frame.sort_values(["device", "axes", "tokens", "case"], kind="stable", ignore_index=True)


def table(inputs):
    """A row for each layer and provider, of its fastest form, else of one that says why it has no time. ``over_ours``:
    its time over Tilewright's, whose box is the chosen one; ``noise``: two standard errors of it."""
    frame = rows(inputs)
    frame = frame[(frame["provider"] != OURS) | (frame["chosen"].astype(str).str.lower() == "true")]
    by_time = frame.sort_values("p50_us", kind="stable").drop_duplicates([*LAYER, "provider"]).sort_index()
    found = by_time.reset_index(drop=True)
    ours = found[found["provider"] == OURS].set_index(LAYER)[["p50_us", "rse"]].add_prefix("ours_")
    found = found.join(ours, on=LAYER)
    found["over_ours"] = found["p50_us"] / found["ours_p50_us"]
    found["noise"] = _read.noise(found["over_ours"], found["rse"], found["ours_rse"])
    return found
