"""Paths of trained networks that a runner may pick: promised time, and mean IoU on scenes that chose nothing."""

import numpy as np

from tilewright.study.tables import _read, _select

TIMES = ["p50_us", "p99_us", "promise_us", "saved_us"]

SHOWN = {
    "case": ("network", ""),
    "rung": ("batch norm", ""),
    "path": ("path", ""),
    "dtype": ("type", ""),
    "batch": ("batch", ".0f"),
    "part": ("measured as", ""),
    "gmacs": ("GMAC", ",.2f"),
    "p50_ms": ("time (ms)", ",.3f"),
    "promise_ms": ("promise (ms)", ",.3f"),
    "time_over": ("time, × full", ".2f"),
    "choice": ("mIoU, choice", ".4f"),
    "test": ("mIoU, test", ".4f"),
    "novel": ("mIoU, novel objects", ".4f"),
    "points": ("points over full", "+.2f"),
    "predicted": ("predicted mIoU, fit", ".4f"),
    "fit": ("mIoU, fit", ".4f"),
    "kept": ("in the table", ""),
    "device": ("device", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "paths")


def measured(inputs):
    """All rows; what did not run has no time. ``full``: text of the path that leaves nothing out."""
    (rows,) = _read.frames(inputs, "paths")
    rows.loc[rows["status"] != "ok", TIMES] = np.nan
    bases = rows[rows["part"] == "base"].drop_duplicates("case").set_index("case")["path"]
    return rows.assign(full=rows["case"].map(bases))


def table(inputs):
    """One row per network, rung and path with a promise, the fastest first. ``time_over``, ``points``: over the full
    path of the same rung, the latter in points of mean IoU on test scenes; ``kept``: no path is faster and better on
    scenes of ``choice``."""
    rows = measured(inputs)
    key = ["case", "rung"]
    full = rows[rows["path"] == rows["full"]].drop_duplicates(key).set_index(key)[["p50_us", "test"]]
    rows = rows.join(full.set_axis(["full_us", "full_test"], axis=1), on=key).dropna(subset="promise_us")
    rows = rows.sort_values([*key, "promise_us", "path"], kind="stable").reset_index(drop=True)
    return rows.assign(
        gmacs=rows["macs"] / 1e9,
        p50_ms=rows["p50_us"] / 1e3,
        promise_ms=rows["promise_us"] / 1e3,
        time_over=rows["p50_us"] / rows["full_us"],
        points=100 * (rows["test"] - rows["full_test"]),
        kept=rows["dominated"].map(lambda path: "" if path else "yes"),
    )
