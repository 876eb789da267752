"""Streams of frames with budgets: misses and mean IoU of each contender, and what switching between paths takes.

Frames with budgets of time, met by paths of a table with a controller and without, by one path for all frames, by the
full path, by static networks that are switched between, by all of these, and by an oracle that knows how long each
path takes. A switch is what a call takes beyond a repeated one where two paths take turns.
"""

from tilewright_study.experiments.paths import table_paths
from tilewright_study.tables import _read, _select

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
    "oracle_share": ("timely, of the oracle's", ".1%"),
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


# ASSUME: the oracle chooses by the table, not by the frame, and may see this much less than one that it bounds.
CHANCE = 0.01


def table(inputs):
    """One row per network, trace and contender. over_fixed, over_static: points of the mean of the frames' mean IoU;
    timely_over_static: with 0 for each late frame; over static networks of equal training alone. oracle_share: of the
    oracle's, with 0 for each late frame, of contenders that run paths of the same table. switch_us: the median over
    neighbours in the table of what a call takes beyond a repeated one where two paths take turns.

    What cannot be is blank: a switch that takes less than no time, and more than the oracle's, beyond `CHANCE`.
    """
    found, frames, switching = rows(inputs)
    key = ["case", "trace"]
    found = found.assign(equal=found["case"].isin(_equally_trained(frames)))
    for name, column in (("oracle", "timely"), ("fixed", "mean"), ("static", "mean"), ("static", "timely")):
        other = found[found["contender"] == name].drop_duplicates(key).set_index(key)[f"{column}_miou"]
        found = found.join(other.rename(f"{name}_{column}"), on=key)
    share = found["timely_miou"] / found["oracle_timely"]
    bounded = (share <= 1 + CHANCE) & ~found["contender"].isin(["static", "joint"])
    static = 100 * found["equal"].map({True: 1.0, False: float("nan")})
    switch_us = switching.groupby("case")["measured_us"].median()
    return found.assign(
        oracle_share=share.clip(upper=1).where(bounded),
        over_fixed=100 * (found["mean_miou"] - found["fixed_mean"]),
        over_static=static * (found["mean_miou"] - found["static_mean"]),
        timely_over_static=static * (found["timely_miou"] - found["static_timely"]),
        switch_us=found["case"].map(switch_us.where(switch_us >= 0)),
    ).reset_index(drop=True)


def _equally_trained(frames):
    """Cases whose static networks, which their frames name, were all trained for as long as they were."""
    named = frames[frames["contender"] == "static"].groupby("case")["path"].unique()
    return [case for case, names in named.items() if {*table_paths.equal(*names)} == {*table_paths.equal(case)}]
