"""Errors of attention by lists, and of networks by such attention, at equal time, by who chooses the keys of heads.

One share of the keys for all heads (single) against shares for each head, by greedy or by an integer program (highs,
gurobi), in the time that a share for all heads would take, as predicted; and one mass of attention for all heads, with
as many keys in all. The error is that of the result, over that by dense attention, on another run than the one that
was measured. Maps are planted, or of a network that was trained here or is official: each row says which.
"""

from tilewright_study.experiments.budgets import DENSE
from tilewright_study.tables import _read, _select

SHOWN = {
    "maps": ("maps", ""),
    "weights": ("weights", ""),
    "case": ("case", ""),
    "keep": ("share allowed", ".2f"),
    "chosen_by": ("chosen by", ""),
    "status": ("status", ""),
    "error": ("error", ".4f"),
    "predicted_error": ("predicted", ".4f"),
    "less": ("less than single", ".1%"),
    "density": ("keys kept", ".1%"),
    "recall": ("recall", ".3f"),
    "p50_us": ("p50 (µs)", ",.1f"),
    "speedup": ("× dense", ".2f"),
    "solve_s": ("to choose (s)", ".2f"),
    "relative_error": ("relative error", ".1e"),
    "reason": ("why blank", ""),
}
PROGRAMS = ("highs", "gurobi")
SINGLE = "single"


def needs(config):
    """One file for each case."""
    return _select.logs(config, "budgets")


def table(inputs):
    """One row per case, share allowed and chooser.

    ``less``: of the error, than that of the best single share in the same time; ``speedup``: of all layers' attention,
    over dense attention.
    """
    (rows,) = _read.frames(inputs, "budgets")
    passed = rows["status"] == "ok"
    single = rows[passed & (rows["chosen_by"] == SINGLE)].drop_duplicates(["case", "keep"])
    rows = rows.join(single.set_index(["case", "keep"])["error"].rename("of_single"), on=["case", "keep"])
    dense = rows[passed & (rows["chosen_by"] == DENSE)].drop_duplicates("case").set_index("case")["p50_us"]
    rows = rows.join(dense.rename("dense_us"), on="case")
    others = passed & ~rows["chosen_by"].isin([SINGLE, DENSE])
    less = (1 - rows["error"] / rows.pop("of_single")).where(others)
    return rows.assign(less=less, speedup=rows.pop("dense_us") / rows["p50_us"])


def program(rows):
    """Rows of the integer program that ran."""
    return rows[rows["chosen_by"].isin(PROGRAMS) & (rows["status"] == "ok")]
