"""What is claimed of the experiment `neighborhood`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.neighborhood import table_neighborhood, table_neighborhood_boxes
from tilewright_study.tables import _read
from tilewright_study.tables._values import cases, passed


def _over(frame, case):
    """The time of the fastest that computes the same over ours, on grids of so many axes."""
    same = frame[(frame["axes"] == float(case)) & ~frame["provider"].isin([table_neighborhood.OURS, _DENSE])]
    best = _read.best(same, table_neighborhood.LAYER, "over_ours").reset_index()
    return cases(best["over_ours"], best["case"], best["noise"])


_DENSE = table_neighborhood.DENSE


def _chosen(frame, _):
    """The time of the chosen box over that of the fastest, of each layer with several."""
    timed = frame[frame.groupby(table_neighborhood.LAYER)["p50_us"].transform("count") > 1]
    best = _read.best(timed, table_neighborhood.LAYER).reset_index()
    return cases(1 / best["over_chosen"], best["case"], best["noise"])


MEASURES = {
    "neighborhood_over": (table_neighborhood.table, _over),
    "neighborhood_chosen": (table_neighborhood_boxes.table, _chosen),
    "neighborhood_passed": (table_neighborhood_boxes.table, passed("provider", table_neighborhood.OURS)),
}
