"""From how many tokens a window pays: one layer and one block of ViT-B against the fastest dense attention.

From how many tokens a window pays: speed-up over the fastest dense attention by tokens and by the share of pairs that
the window keeps, of one attention layer (12 heads of 64) and of one whole block of ViT-B. Below 1 the dense network is
the better choice. Hatched cells were not measured; the table has the reason.
"""

import numpy as np

from tilewright_study.baselines.sparse import DENSE
from tilewright_study.tables import _read, _select

SHOWN = {
    "tokens": ("tokens", ",.0f"),
    "asked": ("density asked for", ".0%"),
    "density": ("density", ".1%"),
    "window": ("window", ".0f"),
    "dense": ("dense by", ""),
    "layer_dense_us": ("layer, dense p50 (µs)", ",.1f"),
    "layer_us": ("layer, plan p50 (µs)", ",.1f"),
    "layer_ratio": ("layer, × dense", ".2f"),
    "masked": ("masked by", ""),
    "masked_us": ("masked p50 (µs)", ",.1f"),
    "masked_ratio": ("layer, × masked", ".2f"),
    "block_dense_us": ("block, dense p50 (µs)", ",.1f"),
    "block_us": ("block, plan p50 (µs)", ",.1f"),
    "block_ratio": ("block, × dense", ".2f"),
    "layer_from": ("layer pays from (tokens)", ",.0f"),
    "block_from": ("block pays from (tokens)", ",.0f"),
    "plan_s": ("plan made in (s)", ".1f"),
    "device": ("device", ""),
    "reason": ("why blank", ""),
}
OURS = "tilewright"
# What rows are of; `PARTS` would be those of the Markdown form.
MEASURED = ("layer", "block")


def needs(config):
    """The experiment's files."""
    return _select.logs(config, "worth")


def table(inputs):
    """One row per device, number of tokens and density, upwards.

    dense: the fastest dense attention of the layer, also of the block. masked: the fastest of what computes the same
    pattern. layer_ratio, block_ratio: how many times as fast as dense a plan is; layer_noise, block_noise: two standard
    errors of it. layer_from, block_from: the fewest tokens from which on the plan is faster by more than that at this
    density, in all sizes that were measured; missing where it is not at the largest.
    """
    import pandas as pd

    (frame,) = _read.frames(inputs, "worth")
    # A failed check has no time, whatever stands there.
    frame.loc[frame["status"] != "ok", ["p50_us", "rse"]] = np.nan
    place = ["device", "dtype", "batch", "compiled", "tokens"]
    # Attention alone is not compiled: whether blocks are goes for all rows.
    frame["compiled"] = frame.groupby(["device", "dtype", "batch"])["compiled"].transform("max")
    ours = frame["provider"] == OURS
    found = _cells(frame, ours, place)
    dense = frame[frame["provider"].isin(DENSE)]
    for part in MEASURED:
        own = frame[ours & (frame["part"] == part)].set_index([*place, "asked"])
        fastest = _read.best(dense[dense["part"] == part], place)
        key = pd.MultiIndex.from_frame(found[[*place, "asked"]])
        at = pd.MultiIndex.from_frame(found[place])
        found[f"{part}_us"], rse = (own[name].reindex(key).to_numpy() for name in ("p50_us", "rse"))
        found[f"{part}_dense_us"], other = (fastest[name].reindex(at).to_numpy() for name in ("p50_us", "rse"))
        found[f"{part}_ratio"] = found[f"{part}_dense_us"] / found[f"{part}_us"]
        found[f"{part}_noise"] = _read.noise(found[f"{part}_ratio"], rse, other)
        if part == "layer":
            found["dense"] = fastest["provider"].reindex(at).fillna("").to_numpy()
        found[f"{part}_reason"] = own["reason"].reindex(key).fillna("").to_numpy()
        found[f"{part}_from"] = _pays_from(found, part)
    others = frame[~ours & ~frame["provider"].isin(DENSE) & (frame["part"] == "layer")]
    masked = _read.best(others, [*place, "asked"])
    for column, name in (("masked", "provider"), ("masked_us", "p50_us")):
        found[column] = masked[name].reindex(key).to_numpy()
    found["masked"] = found["masked"].fillna("")
    found["masked_ratio"] = found["masked_us"] / found["layer_us"]
    found["reason"] = found["layer_reason"].where(found["layer_reason"] != "", found["block_reason"])
    return found


def _cells(frame, ours, place):
    """A row for each density of each grid, with what its layer's row says of the pattern and of the plan."""
    columns = [*place, "asked", "density", "side", "square", "window", "heads", "head_dim", "plan_s"]
    cells = frame[ours & (frame["part"] == "layer")][columns]
    return cells.sort_values(["device", "dtype", "batch", "tokens", "asked"], ignore_index=True)


def _pays_from(found, part):
    """The fewest tokens from which on a part is faster, for each row."""
    out = np.full(len(found), np.nan)
    for _, same in found.groupby(["device", "dtype", "batch", "compiled", "asked"], dropna=False):
        least = np.nan
        for _, row in same[same[f"{part}_ratio"].notna()].sort_values("tokens", ascending=False).iterrows():
            if not row[f"{part}_ratio"] - np.nan_to_num(row[f"{part}_noise"]) > 1:
                break
            least = row["tokens"]
        out[same.index] = least
    return out
