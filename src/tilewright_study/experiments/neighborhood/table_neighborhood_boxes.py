"""Boxes of queries of neighbourhood attention: the time of each that was tried, over that of the chosen one.

Boxes of queries: the time of each that was tried, those that are predicted to be the fastest, over that of the box that
a call takes. Below 1 another box would have been the better choice.
"""

from tilewright_study.experiments.neighborhood import table_neighborhood
from tilewright_study.tables import _read

SHOWN = {
    "case": ("layer", ""),
    "box": ("box", ""),
    "chosen": ("chosen", ""),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.1f"),
    "over_chosen": ("× chosen", ".3f"),
    "predicted": ("× chosen, predicted", ".3f"),
    "fill": ("fill", ".3f"),
    "relative_error": ("relative error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """What the table of layers needs."""
    return table_neighborhood.needs(config)


def table(inputs):
    """A row for each layer and box, the chosen one first. ``over_chosen``: its time over that of the chosen one;
    ``noise``: two standard errors of it."""
    frame = table_neighborhood.rows(inputs)
    found = frame[frame["provider"] == table_neighborhood.OURS].reset_index(drop=True)
    found["is_chosen"] = found["chosen"].astype(str).str.lower() == "true"
    chosen = found[found["is_chosen"]].set_index(table_neighborhood.LAYER)[["p50_us", "rse"]].add_prefix("chosen_")
    found = found.join(chosen, on=table_neighborhood.LAYER)
    found["over_chosen"] = found["p50_us"] / found["chosen_p50_us"]
    found["noise"] = _read.noise(found["over_chosen"], found["rse"], found["chosen_rse"])
    return found
