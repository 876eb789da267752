"""Whole networks, from images to logits: latency of each attention at each batch, and its speed-up over the peers
and over the fastest of them, or a tie where the two are within noise. Attention tilewright has its own plans; the table
`network_plans` shows others."""

from tilewright.study.tables import _read, _select

OURS = "tilewright"
# Each has a column of speed-ups over it.
PEERS = ("native", "dense", "flex")
_KEY = ["network", "batch"]

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
    "peer": ("fastest peer", ""),
    "over_peer": ("× fastest peer", ".2f"),
    "verdict": ("than it", ""),
    "gpu_us": ("as a CUDA graph (µs)", ",.0f"),
    "compiled_us": ("compiled (µs)", ",.0f"),
    "compiled_gpu_us": ("compiled, as a CUDA graph (µs)", ",.0f"),
    "peak_bytes": ("peak memory (bytes)", ",.0f"),
    "relative_error": ("relative error of logits", ".1e"),
    "attention_error": ("of attention", ".1e"),
    "max_abs_error": ("largest logit difference", ".1e"),
    "tolerance": ("tolerance", ".0e"),
    "same_top1": ("same top-1", ".0%"),
    "first_call_s": ("first call (s)", ",.1f"),
    "parameters": ("parameters", ",.0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "networks")


def table(inputs):
    """One row per network, attention and batch, by family, resolution and batch; a row that failed has no time."""
    rows = networks(inputs)
    compiled = rows[rows["compiled"]].set_index([*_KEY, "attention"])[["p50_us", "gpu_us"]]
    rows = rows[~rows["compiled"] & (rows["reorder"] == "")]
    rows = rows.join(compiled.add_prefix("compiled_"), on=[*_KEY, "attention"])
    rows = rows.rename(columns={"compiled_p50_us": "compiled_us"})
    others = rows[rows["attention"] != OURS]
    for peer, theirs in {**{peer: others[others["attention"] == peer] for peer in PEERS}, "peer": others}.items():
        theirs = rows[_KEY].join(_read.best(theirs, _KEY)[["p50_us", "rse"]], on=_KEY)
        ratio = theirs["p50_us"] / rows["p50_us"]
        rows[f"over_{peer}"], rows[f"noise_{peer}"] = ratio, _read.noise(ratio, rows["rse"], theirs["rse"])
    rows = rows.join(_read.best(others, _KEY)["attention"].rename("peer"), on=_KEY).fillna({"peer": ""})
    rows["verdict"] = _read.verdict(rows["over_peer"], rows["noise_peer"]).where(rows["attention"] == OURS, "")
    rows = rows.rename(columns={"network": "model"})
    return _read.in_order(rows.sort_values("batch", kind="stable")).rename(columns={"model": "network"})


def networks(inputs):
    """All rows of networks: a row that failed has no time; ``compiled`` is a bool."""
    (rows,) = _read.frames(inputs, "networks")
    rows["family"] = rows["network"].map(_select.family)
    rows["compiled"] = rows["compiled"].str.lower() == "true"
    rows.loc[rows["status"] != "ok", _read.NETWORK_TIMES] = float("nan")
    return rows
