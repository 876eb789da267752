"""What is claimed of the experiment `recall`: the measures of its claims, see `tables.claims`."""

import numpy as np

from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.experiments.recall import table_recall
from tilewright_study.experiments.slices import table_slices
from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, passed


def _of_maps(frame, maps):
    """Rows of one source of maps: the sources are never mixed."""
    return frame[frame["maps"] == (maps or "planted")]


def _recall_ratio(frame, case):
    """Keys that lists of blocks keep over those of slices, both by the exact shares: ``<group>/<recall>`` on planted
    maps, ``<group>/<recall>/<maps>`` on others."""
    group, target, *maps = case.split("/")
    frame = _of_maps(frame, "".join(maps))
    ours = ~frame["provider"].isin(sparse_baselines.BLOCKS)
    rows = frame[(frame["group"] == group) & (frame["chosen_by"] == table_slices.ORACLE) & ours]
    return by_name(rows[np.isclose(rows["target"], float(target))], "over_slices", "case", "token_order")


def _recall_chosen(frame, case):
    """Keys that the lists of a predictor keep over those by the exact shares: ``<predictor>/<recall>/<maps>``."""
    name, target, maps = case.split("/")
    rows = _of_maps(frame, maps)
    rows = rows[(rows["chosen_by"] == name) & np.isclose(rows["target"], float(target))]
    return by_name(rows, "over_slices", "case", "token_order")


def _recall_over(frame, maps):
    """Time of the fastest lists of blocks over that of slices, where all keep the same share of attention and are
    chosen by the exact shares, on planted ``<maps>`` or others."""
    rows = table_recall.timed(_of_maps(frame, maps))
    rows = rows[rows["chosen_by"] == table_slices.ORACLE]
    ours = (rows["provider"] == table_slices.OURS) & rows["group"].str.endswith("x1")
    blocks = _read.best(rows[~ours], ["case"])["p50_us"].rename("blocks_us")
    mine = rows[ours & (rows["group"] == table_slices.SLICE)].join(blocks, on="case")
    return by_name(mine.assign(over=mine["blocks_us"] / mine["p50_us"]), "over", "case")


MEASURES = {
    "recall_ratio": (table_recall.table, _recall_ratio),
    "recall_over": (table_recall.table, _recall_over),
    "recall_chosen": (table_recall.table, _recall_chosen),
    "recall_passed": (table_recall.table, passed("provider", table_slices.OURS)),
}
