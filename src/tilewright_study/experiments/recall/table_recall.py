"""Keys that lists keep for a share of attention, over those of slices chosen by the exact shares, and times where all
keep the same share.

How many keys lists keep for a share of attention (recall), by shape of groups, order of tokens and chooser; "oracle"
chooses by the exact shares. Maps are planted, made by rule, or captured from a network that was trained here or is
official: each row says which. The recall is measured from log-sum-exps, exactly. Where times are given, all lists keep
the same share of attention.
"""

from tilewright_study.experiments.slices import ORACLE, SLICE, table_slices
from tilewright_study.tables import _read, _select

# Where maps that are not planted are from.
ORIGIN = ["network", "weights", "clip"]

SHOWN = {
    "maps": ("maps", ""),
    "weights": ("weights", ""),
    "case": ("case", ""),
    "token_order": ("token order", ""),
    "target": ("recall asked for", ".2f"),
    "provider": ("provider", ""),
    "group": ("group", ""),
    "chosen_by": ("chosen by", ""),
    "status": ("status", ""),
    "recall": ("recall", ".3f"),
    "density": ("keys kept", ".1%"),
    "over_slices": ("× those of slices", ".2f"),
    "least_density": ("least, a head", ".1%"),
    "most_density": ("most, a head", ".1%"),
    "least_recall": ("least recall, a head", ".3f"),
    "l1_error": ("L1 error", ".3f"),
    "p50_us": ("p50 (µs)", ",.1f"),
    "speedup": ("× dense", ".2f"),
    "relative_error": ("relative error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each case."""
    return _select.logs(config, "recall")


def table(inputs):
    """One row per case, order, recall that was asked for and chooser; where times were taken, per provider.

    ``over_slices``: density over that of single keys for groups of 128 queries, chosen by the exact shares, in the same
    order; ``speedup``: over the fastest dense attention, see `slices.over_dense`.
    """
    (rows,) = _read.frames(inputs, "recall")
    # As text: a missing number is not equal to itself.
    rows["clip"] = rows["clip_noise"].map("{:g}".format)
    key = [*table_slices.CASE, *ORIGIN, "target"]
    rows = table_slices.over_dense(rows, key[:-1])
    exact = rows[(rows["group"] == SLICE) & (rows["chosen_by"] == ORACLE)].drop_duplicates(key).set_index(key)
    rows = rows.join(exact["density"].rename("least"), on=key)
    listed = rows["chosen_by"] != ""
    return rows.assign(over_slices=(rows["density"] / rows.pop("least")).where(listed))


def timed(rows):
    """Rows of attention by lists that all keep the same share of attention, and were timed."""
    return rows[(rows["chosen_by"] != "") & rows["p50_us"].notna()]
