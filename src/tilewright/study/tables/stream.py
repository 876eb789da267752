"""Streams of frames with budgets: misses and mean IoU of each contender, and what switching between paths takes."""

from tilewright.study.tables import _read, _select

SHOWN = {
    "case": ("network", ""),
    "rung": ("batch norm", ""),
    "trace": ("trace", ""),
    "contender": ("contender", ""),
    "frames": ("frames", ",.0f"),
    "missed": ("budgets missed", ".1%"),
    "miou": ("mIoU", ".4f"),
    "mean_miou": ("mean of the frames' mIoU", ".4f"),
    "oracle_share": ("of the oracle's", ".1%"),
    "over_fixed": ("points over one path", "+.2f"),
    "over_static": ("points over static networks", "+.2f"),
    "p50_us": ("time (µs)", ",.0f"),
    "p99_us": ("99th percentile (µs)", ",.0f"),
    "paths": ("paths that ran", ".0f"),
    "pick_us": ("pick (µs)", ".2f"),
    "switch_us": ("switch (µs)", "+.1f"),
    "device": ("device", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "stream")


def rows(inputs):
    """``(in all, frame by frame, switching)``."""
    (frame,) = _read.frames(inputs, "stream")
    frames = frame["part"] == "frames"
    return frame[frames & frame["frame"].isna()], frame[frames & frame["frame"].notna()], frame[~frames]


def table(inputs):
    """One row per network, trace and contender. oracle_share, over_fixed, over_static: of the mean of the frames' mean
    IoU. switch_us: the median over neighbours in the table of what a call takes beyond a repeated one where two paths
    take turns."""
    found, _, switching = rows(inputs)
    key = ["case", "trace"]
    for name in ("oracle", "fixed", "static"):
        other = found[found["contender"] == name].drop_duplicates(key).set_index(key)["mean_miou"]
        found = found.join(other.rename(f"{name}_miou"), on=key)
    return found.assign(
        oracle_share=found["mean_miou"] / found["oracle_miou"],
        over_fixed=100 * (found["mean_miou"] - found["fixed_miou"]),
        over_static=100 * (found["mean_miou"] - found["static_miou"]),
        switch_us=found["case"].map(switching.groupby("case")["measured_us"].median()),
    ).reset_index(drop=True)
