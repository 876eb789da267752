"""Trained pruned networks: images named right, over all trainings, beside images a second, and which of them no other
beats in both.

DeiTs that were trained here to name the main object of crops of scenes, with every pruner at several ratios: images
named right beside images a second. All pruners prune the same weights, as published for EViT, ATS and Threshold-L2;
DynamicViT's predictor is trained besides, at one ratio. Each network is trained several times, from other weights and
on other crops; whiskers and the table show the spread. Crops of new scenes are of objects that were trained on, and of
novel ones. Speed is that of the network until its logits are there, checked before it was timed.
"""

import numpy as np

from tilewright.networks.batching import UNPRUNED
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.tables import _read, _select

_MEANS = ["images", "predictor_images", "top1", "top5", "novel_top1", "kept", "lost"]
_TIMED = ["images_per_s", "p50_us", "over_unpruned", "over_padded"]
_KEY = ["network", "pruner", "setting", "batching", "mode", "batch"]

SHOWN = {
    "network": ("network", ""),
    "pruner": ("pruner", ""),
    "setting": ("setting", ""),
    "batching": ("batching", ""),
    "mode": ("mode", ""),
    "batch": ("batch", ".0f"),
    "trainings": ("trainings", ".0f"),
    "images": ("trained on images", ",.0f"),
    "predictor_images": ("its predictor on", ",.0f"),
    "kept": ("tokens kept", ".1%"),
    "top1": ("top-1", ".2%"),
    "least_top1": ("least", ".2%"),
    "most_top1": ("most", ".2%"),
    "lost": ("lost (points)", ".2f"),
    "top5": ("top-5", ".2%"),
    "novel_top1": ("top-1, novel objects", ".2%"),
    "images_per_s": ("images/s", ",.0f"),
    "over_unpruned": ("× unpruned", ".2f"),
    "over_padded": ("× padded", ".2f"),
    "front": ("on the front", ""),
    "changed": ("named otherwise than padded", ".0f"),
    "crops": ("of crops", ".0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network and training."""
    return _select.logs(config, "pruned_accuracy")


def table(inputs):
    """One row per network, pruner, setting, batching, mode and batch, over its trainings; the network without a pruner,
    which was timed beside each setting, is one row.

    images, predictor_images, top1, top5, novel_top1, kept, images_per_s: means; over_unpruned, over_padded: of times
    that were taken together, means; least_top1, most_top1: of a training. lost: points of top-1 below the same
    trainings without a pruner. changed, crops: sums. front: ``yes`` where no other row of that network, mode and batch
    is at least as good in mean top-1 and in images a second, and better in one. A row that has no time in some training
    has none.
    """
    (rows,) = _read.frames(inputs, "pruned_accuracy")
    rows.loc[rows["status"] != "ok", _read.PRUNED_TIMES] = np.nan
    together = ["network", "training", "pruner", "setting", "mode", "batch"]
    for peer in (UNPRUNED, table_pruned.PADDED):
        theirs = rows[rows["batching"] == peer].drop_duplicates(together).set_index(together)
        own = rows[together].join(theirs[["p50_us", "top1"]], on=together)
        rows[f"over_{peer}"] = own["p50_us"] / rows["p50_us"]
        if peer == UNPRUNED:
            rows["lost"] = 100 * (own["top1"] - rows["top1"])
    whole = rows["batching"] == UNPRUNED
    rows.loc[whole, ["pruner", "setting"]] = ""
    rows.loc[whole, "kept"] = 1.0
    # What runs beside a predictor does not ask it.
    rows.loc[whole, "predictor_images"] = np.nan
    found = rows.groupby(_KEY, sort=False, dropna=False)
    # Means of times, unless one is missing.
    times = {name: found[name].agg(lambda x: x.mean(skipna=False)) for name in _TIMED}
    frame = found[_MEANS].mean().assign(**times)
    frame = frame.assign(
        trainings=found["training"].nunique(),
        least_top1=found["top1"].min(),
        most_top1=found["top1"].max(),
        changed=found["changed"].sum(min_count=1),
        crops=found["crops"].sum(),
        reason=found["reason"].agg(lambda x: "; ".join(dict.fromkeys(filter(None, x)))),
        device=found["device"].first(),
        dtype=found["dtype"].first(),
    ).reset_index()
    frame["crops"] = frame["crops"].where(frame["changed"].notna())
    frame["front"] = ""
    for _, group in frame.groupby(["network", "mode", "batch"], sort=False):
        frame.loc[front(group), "front"] = "yes"
    return frame


def front(rows):
    """Index of those of `rows` that no other beats: at least as good in top-1 and in images a second, better in one."""
    timed = rows.dropna(subset=["top1", "images_per_s"])
    kept = []
    for at, row in timed.iterrows():
        as_good = (timed["top1"] >= row["top1"]) & (timed["images_per_s"] >= row["images_per_s"])
        better = (timed["top1"] > row["top1"]) | (timed["images_per_s"] > row["images_per_s"])
        if not (as_good & better).any():
            kept.append(at)
    return kept
