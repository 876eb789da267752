"""What is claimed of the experiment `slices`: the measures of its claims, see `tables.claims`."""

import numpy as np

from tilewright_study.experiments.slices import table_slices
from tilewright_study.tables._values import cases, passed


def _at_sparsity(frame, case):
    """The rows of ``<sparsity>/<case>``, or all."""
    if not case:
        return frame
    sparsity, name = case.split("/")
    return frame[np.isclose(frame["sparsity"], float(sparsity)) & (frame["case"] == name)]


def _slices_over(frame, case):
    """Attention by lists of equal length over the fastest dense one: ``dense/<sparsity>/<case>``."""
    rows = table_slices.attending(_at_sparsity(frame, case.partition("/")[2]))
    return _of_case(rows[rows["lengths"] == "equal"], "speedup")


def _slices_made(frame, case):
    """Attention by lists that are made in each call, over the fastest dense one: ``<predictor>/<sparsity>/<case>``."""
    name, _, case = case.partition("/")
    rows = _at_sparsity(frame, case)
    return _of_case(rows[(rows["chosen_by"] == name) & (rows["call"] == "predict_attend")], "speedup")


def _slices_uneven(frame, _):
    """Pairs a second by uneven lists over those by lists of equal length that keep as many."""
    mine = table_slices.attending(frame)
    key = ["case", "sparsity"]
    equal = mine[mine["lengths"] == "equal"].set_index(key)["useful_gflops"].rename("equal_gflops")
    rows = mine[mine["lengths"] == "uneven"].join(equal, on=key)
    return _of_case(rows.assign(rate=rows["useful_gflops"] / rows["equal_gflops"]), "rate")


def _predict_share(frame, case):
    """Choosing the keys over the fastest dense attention, in percent: ``<predictor>/<case>``."""
    name, case = case.split("/")
    rows = frame[(frame["case"] == case) & (frame["chosen_by"] == name) & (frame["call"] == "predict")]
    return _of_case(rows.assign(percent=100 / rows["speedup"]), "percent")


def _of_case(rows, column):
    where = [f"{case} at {sparsity:.0%}" for case, sparsity in zip(rows["case"], rows["sparsity"], strict=True)]
    return cases(rows[column], where, rows["noise"] if column == "speedup" else np.nan)


MEASURES = {
    "slices_over": (table_slices.table, _slices_over),
    "slices_made": (table_slices.table, _slices_made),
    "slices_uneven": (table_slices.table, _slices_uneven),
    "predict_share": (table_slices.table, _predict_share),
    "slices_passed": (table_slices.table, passed("provider", table_slices.OURS)),
}
