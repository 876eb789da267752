"""Whole networks with other plans than their own: latency by order, solver and tiles, and how it compares with the
plans that attention tilewright makes by itself.

Whole networks with plans of each order and solver, beside the plans that a network makes by itself (order ``window``,
solver ``highs``, all tiles of the device). A mark above 1 is faster than those. The lines are the network with another
attention: as published, masked dense attention, FlexAttention. Each was checked like all networks of the study before
its time was taken. Networks whose patterns depend on the image (DynamicViT) have no plans made ahead; their rows say
so.
"""

from tilewright.networks import Plans
from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.tables import _read

_KEY = ["network", "batch"]

SHOWN = {
    "network": ("network", ""),
    "batch": ("batch", ".0f"),
    "reorder": ("order", ""),
    "solver": ("solver", ""),
    "tiles": ("tiles", ""),
    "status": ("status", ""),
    "p50_us": ("p50 (µs)", ",.0f"),
    "attention_us": ("attention (µs)", ",.0f"),
    "gpu_us": ("as a CUDA graph (µs)", ",.0f"),
    "over_own": ("× its own plans", ".3f"),
    "over_native": ("× native", ".3f"),
    "over_dense": ("× dense", ".3f"),
    "over_flex": ("× flex", ".3f"),
    "over_full": ("× full", ".3f"),
    "peak_bytes": ("peak memory (bytes)", ",.0f"),
    "relative_error": ("relative error of logits", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """What `end_to_end` needs, where the study has other plans."""
    return table_end_to_end.needs(config) if config.networks.plans else []


def table(inputs):
    """One row per network, batch and plans, its own first.

    ``over_<rival>``: the rival's time over its own, above 1 where these plans are faster: of the network's own plans,
    and of the peers, each with the faster of its rows, compiled or not. Times as a CUDA graph where both have one, else
    p50.
    """
    rows = table_end_to_end.networks(inputs)
    # Other plans than its own are not compiled.
    mine, own = rows[(rows["attention"] == table_end_to_end.OURS) & ~rows["compiled"]], Plans()
    rivals = {"own": mine[mine["reorder"] == ""]} | {n: rows[rows["attention"] == n] for n in table_end_to_end.PEERS}
    # What has no other plans is not compared.
    mine = mine[mine["network"].isin(mine.loc[mine["reorder"] != "", "network"])].copy()
    for rival, theirs in rivals.items():
        ratios = [
            mine[_KEY].join(_read.best(theirs, _KEY, column)[column], on=_KEY)[column] / mine[column]
            for column in ("gpu_us", "p50_us")
        ]
        mine[f"over_{rival}"] = ratios[0].fillna(ratios[1])
    blank = mine["reorder"] == ""
    mine.loc[blank, ["reorder", "solver"]] = own.reorder, own.solver
    mine = mine.rename(columns={"network": "model"}).sort_values("batch", kind="stable")
    return _read.in_order(mine).rename(columns={"model": "network"})
