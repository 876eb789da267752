"""Pruned networks, from images to logits: each strategy for the kept tokens in each mode, and its speed-up over padding
to the full length and over the best of the fair baselines in the same mode."""

from tilewright.tables import read, select

OURS, PADDED = "ragged", "padded"
FAIR = ("padded_kept", "gathered", "varlen")
_KEY = ["network", "setting", "batch", "mode"]

SHOWN = {
    "network": ("network", ""),
    "setting": ("setting", ""),
    "batch": ("batch", ".0f"),
    "mode": ("mode", ""),
    "strategy": ("strategy", ""),
    "status": ("status", ""),
    "images_per_s": ("images/s", ",.0f"),
    "p50_us": ("p50 (µs)", ",.0f"),
    "over_padded": ("× padded", ".2f"),
    "over_fair": ("× best fair", ".2f"),
    "fair": ("best fair", ""),
    "pack_share": ("pack + unpack", ".1%"),
    "fewest_kept": ("fewest tokens", ".0f"),
    "most_kept": ("most tokens", ".0f"),
    "max_abs_error": ("largest logit difference", ".1e"),
    "same_top1": ("same top-1", ".1%"),
    "same_tokens": ("images with the same tokens", ".0f"),
    "inputs": ("of", ".0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return select.pruned(config)


def table(inputs):
    """One row per network, setting, batch, mode and strategy; a row that failed has no time. ``fair``: the best of
    `FAIR` there, which ``over_fair`` is over."""
    (rows,) = read.frames(inputs, "pruned")
    rows.loc[rows["status"] != "ok", read.PRUNED_TIMES] = float("nan")
    padded = rows[rows["strategy"] == PADDED].set_index(_KEY)["p50_us"].rename("padded_us")
    best = rows[rows["strategy"].isin(FAIR)].dropna(subset="p50_us").sort_values("p50_us", kind="stable")
    best = best.drop_duplicates(_KEY).set_index(_KEY)[["strategy", "p50_us"]]
    rows = rows.join(padded, on=_KEY).join(best.set_axis(["fair", "fair_us"], axis=1), on=_KEY)
    rows["over_padded"] = rows["padded_us"] / rows["p50_us"]
    rows["over_fair"] = rows["fair_us"] / rows["p50_us"]
    return rows
