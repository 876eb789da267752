"""One pass of a video network by kind of attention: time, speed-up over dense attention, and what the lists keep.

One pass of a video network (latents, a time and a prompt to the velocity) by kind of attention. Lists are made in each
so many-th pass and kept in between; a pass is the mean of those. Attention is that of all layers, choosing what is
predicted for them, both timed by themselves. "All keys, error" is the velocity with lists of all keys against dense
attention, "relative error" an attention against float64 over its lists: both are checked before anything is timed.
"Velocity off by" and PSNR say what the lists lose with these weights; with random ones they say nothing.
"""

import numpy as np

from tilewright_study.tables import _read, _select

CASE = ["network", "weights", "layers", "grid", "dtype", "device"]
TIMES = ["p20_us", "p50_us", "p80_us", "rse", "made_us", "kept_us", "attend_us", "predict_us", "rest_us", "peak_bytes"]

SHOWN = {
    "case": ("network", ""),
    "weights": ("weights", ""),
    "tokens": ("tokens", ",.0f"),
    "mode": ("mode", ""),
    "attention": ("attention", ""),
    "token_order": ("token order", ""),
    "every": ("lists made every … passes", ".0f"),
    "status": ("status", ""),
    "density": ("keys kept", ".1%"),
    "recall": ("recall", ".3f"),
    "flops_share": ("FLOPs, of dense", ".0%"),
    "p50_ms": ("a pass (ms)", ",.2f"),
    "speedup": ("× dense", ".2f"),
    "attend_share": ("attention", ".0%"),
    "predict_share": ("choosing", ".1%"),
    "peak_gib": ("memory of a pass (GiB)", ",.1f"),
    "lists_mib": ("lists kept (MiB)", ",.1f"),
    "velocity_error": ("velocity off by", ".3f"),
    "psnr": ("clip, PSNR (dB)", ".1f"),
    "relative_error": ("relative error", ".1e"),
    "whole_error": ("all keys, error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "video")


def table(inputs):
    """One row per network, mode and attention. ``speedup``: over dense attention of the same network, in its faster
    mode; ``case``: the network and its layers; ``attend_share``, ``predict_share``: of a pass."""
    (rows,) = _read.frames(inputs, "video")
    rows.loc[rows["status"] != "ok", TIMES] = np.nan
    dense = _read.best(rows[rows["by"] == "dense"], CASE)[["p50_us", "rse"]]
    rows = rows.join(dense.set_axis(["dense_us", "dense_rse"], axis=1), on=CASE)
    rows["speedup"] = rows["dense_us"] / rows["p50_us"]
    rows["noise"] = _read.noise(rows["speedup"], rows["rse"], rows["dense_rse"])
    rows["case"] = rows["network"] + rows["layers"].map(lambda n: "" if np.isnan(n) else f", {n:.0f} layers")
    rows["ours"] = rows["by"] != "dense"
    rows["p50_ms"] = rows["p50_us"] / 1e3
    for part in ("attend", "predict"):
        rows[f"{part}_share"] = rows[f"{part}_us"] / rows["p50_us"]
    return rows.assign(peak_gib=rows["peak_bytes"] / 2**30, lists_mib=rows["lists_bytes"] / 2**20)
