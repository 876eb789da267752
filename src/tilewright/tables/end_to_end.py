"""Whole networks, from images to logits: latency of each attention at each batch, and its speed-up over the peers."""

from tilewright.tables import read, select

# Each has a column of speed-ups over it.
PEERS = ("native", "dense", "flex")

SHOWN = {
    "network": ("network", ""),
    "attention": ("attention", ""),
    "batch": ("batch", ".0f"),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.0f"),
    "p20_us": ("p20 (µs)", ",.0f"),
    "p80_us": ("p80 (µs)", ",.0f"),
    "attention_us": ("attention (µs)", ",.0f"),
    "rest_us": ("rest (µs)", ",.0f"),
    "images_per_s": ("images/s", ",.1f"),
    "over_native": ("× native", ".2f"),
    "over_dense": ("× dense", ".2f"),
    "over_flex": ("× flex", ".2f"),
    "max_abs_error": ("largest logit difference", ".1e"),
    "tolerance": ("tolerance", ".0e"),
    "same_top1": ("same top-1", ".0%"),
    "first_call_s": ("first call (s)", ",.1f"),
    "parameters": ("parameters", ",.0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return select.networks(config)


def table(inputs):
    """One row per network, attention and batch, by family, resolution and batch; a row that failed has no time."""
    (rows,) = read.frames(inputs, "network")
    rows["family"] = rows["network"].map(select.family)
    rows.loc[rows["status"] != "ok", read.NETWORK_TIMES] = float("nan")
    key = ["network", "batch"]
    for peer in PEERS:
        theirs = rows[rows["attention"] == peer].set_index(key)["p50_us"].rename("peer_us")
        rows[f"over_{peer}"] = rows.join(theirs, on=key)["peer_us"] / rows["p50_us"]
    rows = rows.rename(columns={"network": "model"})
    return read.in_order(rows.sort_values("batch", kind="stable")).rename(columns={"model": "network"})
