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
    "timely_miou": ("the same, late frames as 0", ".4f"),
    "oracle_share": ("of the oracle's", ".1%"),
    "over_fixed": ("points over one path", "+.2f"),
    "over_static": ("points over static networks", "+.2f"),
    "timely_over_static": ("the same, late frames as 0", "+.2f"),
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
    IoU; timely_over_static: with 0 for each late frame. switch_us: the median over neighbours in the table of what a
    call takes beyond a repeated one where two paths take turns."""
    found, _, switching = rows(inputs)
    key = ["case", "trace"]
    for name, column in (("oracle", "mean"), ("fixed", "mean"), ("static", "mean"), ("static", "timely")):
        other = found[found["contender"] == name].drop_duplicates(key).set_index(key)[f"{column}_miou"]
        found = found.join(other.rename(f"{name}_{column}"), on=key)
    return found.assign(
        oracle_share=found["mean_miou"] / found["oracle_mean"],
        over_fixed=100 * (found["mean_miou"] - found["fixed_mean"]),
        over_static=100 * (found["mean_miou"] - found["static_mean"]),
        timely_over_static=100 * (found["timely_miou"] - found["static_timely"]),
        switch_us=found["case"].map(switching.groupby("case")["measured_us"].median()),
    ).reset_index(drop=True)
