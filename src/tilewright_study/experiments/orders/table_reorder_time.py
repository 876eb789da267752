"""Time and memory that each order costs, by size of the graph, and the gathered work that it leaves (64-row slices).

Time that each order takes as the graph grows (left, milliseconds, both axes logarithmic), and the pairs that slices of
64 consecutive rows then gather, over all pairs (right). Less is better in both. The order is found once for a pattern,
not for each image.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tokens": ("tokens", ",.0f"),
    "entries": ("entries", ",.0f"),
    "distinct_rows": ("distinct rows", ",.0f"),
    "seconds": ("time (s)", ".3f"),
    "peak_gib": ("peak memory (GiB)", ".2f"),
    "work_fraction": ("gathered pairs / dense", ".4f"),
}


def needs(config):
    """The one file of reorder times."""
    return _select.logs(config, "orders")


def table(inputs):
    """One row per graph and order, by tokens."""
    (rows,) = _read.frames(inputs, "orders")
    rows["peak_gib"] = rows["peak_rss_bytes"] / 2**30
    return rows.sort_values(["tokens", "model"], kind="stable", ignore_index=True)
