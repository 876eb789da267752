"""Pruned networks, from images to logits: each strategy for the kept tokens in each mode, and its speed-up in the same
mode over padding to the full length, with fused attention and as published, and over the best of the fair baselines,
those in dense batches and those with FlashAttention for packed ones."""

from tilewright.tables import read, select

OURS, PADDED, PUBLISHED = "ragged", "padded", "padded_unfused"
DENSE = ("padded_kept", "gathered")
FAIR = (*DENSE, "varlen")
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
    "over_published": ("× published padded", ".2f"),
    "over_dense": ("× best dense", ".2f"),
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
    `FAIR` there, which ``over_fair`` is over, as ``over_dense`` is over the best of `DENSE`."""
    (rows,) = read.frames(inputs, "pruned")
    rows.loc[rows["status"] != "ok", read.PRUNED_TIMES] = float("nan")
    rows = rows.join(_best(rows, FAIR)["strategy"].rename("fair"), on=_KEY)
    for over, names in {"padded": [PADDED], "published": [PUBLISHED], "dense": DENSE, "fair": FAIR}.items():
        best_us = _best(rows, names)["p50_us"].rename("best_us")
        rows[f"over_{over}"] = rows.join(best_us, on=_KEY)["best_us"] / rows["p50_us"]
    return rows


def _best(rows, names):
    """The fastest row of some strategies in each case."""
    fastest = rows[rows["strategy"].isin(names)].dropna(subset="p50_us").sort_values("p50_us", kind="stable")
    return fastest.drop_duplicates(_KEY).set_index(_KEY)
