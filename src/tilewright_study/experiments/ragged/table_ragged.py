"""Attention of packed images and the calls that pack them: GPU time, the host's time of a call, and our speed-up.

Attention of packed images of different lengths, and the calls that pack and unpack them: GPU time by graph replay (on a
CPU the host's clock), what a prepared call takes of the host, and each peer's time over ours. Every result was compared
first, attention with float64, moved tokens with the very values. "sdpa_flash" attends to padding too where lengths
differ: a bound, not the same result.
"""

from tilewright_study.tables import _read, _select

OURS = "tilewright"
KEY = ["heads", "head_dim", "lengths", "images", "call"]

SHOWN = {
    "heads": ("heads", ".0f"),
    "head_dim": ("head dim", ".0f"),
    "lengths": ("tokens of an image", ""),
    "images": ("images", ".0f"),
    "tokens": ("tokens", ",.0f"),
    "provider": ("provider", ""),
    "call": ("call", ""),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.1f"),
    "host_us": ("host, a call (µs)", ",.1f"),
    "latency_us": ("until the result (µs)", ",.1f"),
    "over_ours": ("× ours", ".2f"),
    "useful_gflops": ("useful GFLOP/s", ",.0f"),
    "floor_fraction": ("byte floor / time", ".2f"),
    "exact": ("exact", ""),
    "relative_error": ("relative error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each shape of heads."""
    return _select.logs(config, "ragged")


def table(inputs):
    """One row per shape, lengths, images, provider and call; a row that failed has no time. ``over_ours``: its time
    over ours."""
    (rows,) = _read.frames(inputs, "ragged")
    rows.loc[rows["status"] != "ok", _read.RAGGED_TIMES] = float("nan")
    rows = rows.sort_values(KEY[:-1], kind="stable").reset_index(drop=True)
    ours = rows[rows["provider"] == OURS].set_index(KEY)["p50_us"].rename("ours_us")
    return rows.assign(over_ours=rows["p50_us"] / rows.join(ours, on=KEY)["ours_us"])
