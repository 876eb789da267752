"""Attention by slice lists at set sparsities: time, speed-up over the fastest dense attention, and what is lost.

Attention by slice lists: groups of 128 queries attend to single keys of their own, chosen on the device, beside lists
of whole blocks and dense attention, at set sparsities. Times are GPU time by graph replay; on a CPU the host's clock,
contenders taking turns. The queries and keys are planted, with maps of known density: recall and errors say what the
lists lose there, not what a trained network would lose. Every result was compared with attention in float64 over the
same lists before it was timed. "Uneven" lists differ in length between groups and heads.
"""

import numpy as np

from tilewright_study.experiments.slices import ORACLE, SLICE
from tilewright_study.tables import _read, _select

OURS = "tilewright"
CASE = ["maps", "heads", "head_dim", "grid", "token_order", "dtype", "device"]

SHOWN = {
    "case": ("case", ""),
    "sparsity": ("sparsity", ".0%"),
    "provider": ("provider", ""),
    "call": ("call", ""),
    "group": ("group", ""),
    "chosen_by": ("chosen by", ""),
    "lengths": ("lists", ""),
    "status": ("status", ""),
    "density": ("keys kept", ".1%"),
    "p50_us": ("p50 (µs)", ",.1f"),
    "speedup": ("× dense", ".2f"),
    "recall": ("recall", ".3f"),
    "l1_error": ("L1 error", ".3f"),
    "cosine": ("cosine", ".4f"),
    "host_us": ("host, a call (µs)", ",.1f"),
    "useful_gflops": ("useful GFLOP/s", ",.0f"),
    "relative_error": ("relative error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each case."""
    return _select.logs(config, "slices")


def table(inputs):
    """One row per case, sparsity and call. ``lengths``: whether lists are of ``equal`` length or ``uneven``;
    ``speedup``: over the fastest dense attention of the case, whose time knows no sparsity; ``noise``: two standard
    errors of it."""
    (rows,) = _read.frames(inputs, "slices")
    return over_dense(rows, CASE)


def over_dense(rows, key):
    """`rows` with ``case``, ``lengths``, ``speedup`` and ``noise``; dense attention is that of the same `key`."""
    rows = rows.copy()
    rows.loc[rows["status"] != "ok", _read.RAGGED_TIMES[:-2]] = np.nan
    dense = _read.best(rows[rows["provider"].isin(_read.DENSE)], key)[["p50_us", "rse"]]
    rows = rows.join(dense.set_axis(["dense_us", "dense_rse"], axis=1), on=key)
    rows["case"] = (
        _origin(rows)
        + rows["heads"].map("{:.0f}".format)
        + "x"
        + rows["head_dim"].map("{:.0f}".format)
        + "-"
        + rows["grid"]
    )
    rows["lengths"] = np.select([rows["keep"].notna(), rows["mass"].notna()], ["equal", "uneven"], "")
    rows["speedup"] = rows["dense_us"] / rows["p50_us"]
    return rows.assign(noise=_read.noise(rows["speedup"], rows["rse"], rows["dense_rse"]))


def _origin(rows):
    """What stands before the shape of a case where maps are not planted: whose they are, and the noise in the clip."""
    if "clip_noise" not in rows or rows["maps"].eq("planted").all():
        return ""
    noise = rows["clip_noise"].map(lambda share: "" if np.isnan(share) else f", {share:.0%} noise, ")
    return (rows["maps"] + " " + rows["weights"] + ", " + rows["network"] + noise).where(rows["maps"] != "planted", "")


def attending(rows, group=SLICE, chosen_by=ORACLE):
    """Our rows of attention by lists that are given."""
    mine = rows[(rows["provider"] == OURS) & (rows["call"] == "attend")]
    return mine[(mine["group"] == group) & (mine["chosen_by"] == chosen_by)]
