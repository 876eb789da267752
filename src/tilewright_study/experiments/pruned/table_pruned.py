"""Pruned networks, from images to logits: each batching for the kept tokens in each mode, and its speed-up over the
network without its pruner, over padding to the full length, with fused attention and as published, and over the best of
all other batchings, those in dense batches and those with FlashAttention for packed ones: each with the faster of its
rows, compiled or not, that are called alike.

Pruned DeiTs from images to logits: the kept tokens go on padded to the full length, padded to the longest image,
gathered densely (where all images keep equally many), packed with FlashAttention's varlen kernel, or packed with
Tilewright's; each as it is, as a CUDA graph and, for some, compiled. A batching whose lengths the host has to ask for
cannot be captured and is blank with the reason. Weights are random, the same for all; before a time was taken, logits
were compared with those of the padded network, over the images that kept the same tokens. Ties of nearly equal scores
may fall otherwise in 16 bits; how many images kept the same tokens is in the table, as is the share of all images with
the same most probable class. A difference of two times within two standard errors is a tie.
"""

from tilewright.networks.batching import UNPRUNED
from tilewright_study.tables import _read, _select

OURS, PADDED, PUBLISHED = "ragged", "padded", "padded_unfused"
DENSE = ("padded_kept", "gathered", PADDED, PUBLISHED)
FAIR = (*DENSE, "varlen")
# A column of speed-ups is over the fastest of these batchings.
PEERS = {"unpruned": (UNPRUNED,), "padded": (PADDED,), "published": (PUBLISHED,), "dense": DENSE, "fair": FAIR}
# Modes that are called alike: a graph is held against graphs.
WAYS = {"eager": "called", "compile": "called", "graph": "graph", "compile_graph": "graph"}
_KEY = ["network", "setting", "batch", "way"]

SHOWN = {
    "network": ("network", ""),
    "setting": ("setting", ""),
    "batch": ("batch", ".0f"),
    "mode": ("mode", ""),
    "batching": ("batching", ""),
    "status": ("status", ""),
    "images_per_s": ("images/s", ",.0f"),
    "p50_us": ("p50 (µs)", ",.0f"),
    "over_unpruned": ("× unpruned", ".2f"),
    "over_padded": ("× padded", ".2f"),
    "over_published": ("× published padded", ".2f"),
    "over_dense": ("× best dense", ".2f"),
    "over_fair": ("× best fair", ".2f"),
    "fair": ("best fair", ""),
    "ties": ("within noise of", ""),
    "pack_share": ("pack + unpack", ".1%"),
    "fewest_kept": ("fewest tokens", ".0f"),
    "most_kept": ("most tokens", ".0f"),
    "relative_error": ("relative error of logits", ".1e"),
    "max_abs_error": ("largest logit difference", ".1e"),
    "same_top1": ("same top-1, of the same tokens", ".1%"),
    "same_top1_all": ("same top-1, all images", ".1%"),
    "compared": ("images of the same tokens", ".0%"),
    "inputs": ("of", ".0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "pruned")


def table(inputs):
    """One row per network, setting, batch, mode and batching; a row that failed has no time. ``fair``: the best of
    `FAIR` there, which ``over_fair`` is over, as ``over_dense`` is over the best of `DENSE`. ``noise_<peer>``: two
    standard errors of ``over_<peer>``; ``ties``: the peers that are within it."""
    (rows,) = _read.frames(inputs, "pruned")
    rows.loc[rows["status"] != "ok", _read.PRUNED_TIMES] = float("nan")
    rows["way"] = rows["mode"].map(WAYS)
    rows["compared"] = rows["same_tokens"] / rows["inputs"]
    fair = rows[rows["batching"].isin(FAIR)]
    rows = rows.join(_read.best(fair, _KEY)["batching"].rename("fair"), on=_KEY)
    rows["ties"] = ""
    for over, names in PEERS.items():
        theirs = rows[_KEY].join(_read.best(rows[rows["batching"].isin(names)], _KEY)[["p50_us", "rse"]], on=_KEY)
        ratio = theirs["p50_us"] / rows["p50_us"]
        rows[f"over_{over}"], rows[f"noise_{over}"] = ratio, _read.noise(ratio, rows["rse"], theirs["rse"])
        tie = (_read.verdict(ratio, rows[f"noise_{over}"]) == "tie") & ~rows["batching"].isin(names)
        rows["ties"] += tie.map({True: f"{over}, ", False: ""})
    return rows.assign(ties=rows["ties"].str.removesuffix(", "))
