"""Paths of trained networks that a runner may pick: promised time, and mean IoU on scenes that chose nothing.

Paths of trained networks that a runner may pick from, the fastest first: products, time, the time that is promised, and
mean IoU. Models are fitted on scenes of fit, paths are chosen on scenes of choice, and results are those on scenes of
test; novel objects were never trained on. A path is in the table where no other is faster and better on scenes of
choice.
"""

import math
import re

import numpy as np
from scipy.sparse import csgraph

from tilewright_study import training
from tilewright_study.tables import _read, _select

TIMES = ["p50_us", "p99_us", "promise_us", "saved_us"]
# What paths of two networks have alike where one is compared with the other: other code may be other kernels.
ALIKE = ["resolution", "data", "device", "dtype", "batch", "compiled", "kernels"]
# Recipes of static networks that were trained for as long as one whose paths were trained; of others it is their own.
EQUAL = {"sampled": "continued", "depthless": "continued"}
# Of two codes whose full paths of a network take the same time, but for this share of it, the kernels are the same.
SAME = 0.05

SHOWN = {
    "case": ("network", ""),
    "rung": ("batch norm", ""),
    "path": ("path", ""),
    "dtype": ("type", ""),
    "batch": ("batch", ".0f"),
    "compiled": ("compiled", ""),
    "part": ("measured as", ""),
    "gmacs": ("GMAC", ",.2f"),
    "p50_ms": ("time (ms)", ",.3f"),
    "promise_ms": ("promise (ms)", ",.3f"),
    "time_over": ("time, × full", ".2f"),
    "choice": ("mIoU, choice", ".4f"),
    "test": ("mIoU, test", ".4f"),
    "novel": ("mIoU, novel objects", ".4f"),
    "points": ("points over full", "+.2f"),
    "predicted": ("predicted mIoU, fit", ".4f"),
    "fit": ("mIoU, fit", ".4f"),
    "kept": ("in the table", ""),
    "device": ("device", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "paths")


def measured(inputs):
    """All rows; what did not run has no time. ``full``: text of the path that leaves nothing out; ``resolution``: of
    the network, as its name has it."""
    (rows,) = _read.frames(inputs, "paths")
    rows.loc[rows["status"] != "ok", TIMES] = np.nan
    bases = rows[rows["part"] == "base"].drop_duplicates("case").set_index("case")["path"]
    return rows.assign(full=rows["case"].map(bases), resolution=rows["network"].str.rpartition("-")[2])


def table(inputs):
    """One row per network, rung and path with a promise, the fastest first. ``time_over``, ``points``: over the full
    path of the same rung, the latter in points of mean IoU on test scenes; ``kept``: no path is faster and better on
    scenes of ``choice``."""
    rows = measured(inputs)
    key = ["case", "rung"]
    full = rows[rows["path"] == rows["full"]].drop_duplicates(key).set_index(key)[["p50_us", "test"]]
    rows = rows.join(full.set_axis(["full_us", "full_test"], axis=1), on=key).dropna(subset="promise_us")
    rows = rows.sort_values([*key, "promise_us", "path"], kind="stable").reset_index(drop=True)
    return rows.assign(
        kernels=_kernels(rows),
        gmacs=rows["macs"] / 1e9,
        p50_ms=rows["p50_us"] / 1e3,
        promise_ms=rows["promise_us"] / 1e3,
        time_over=rows["p50_us"] / rows["full_us"],
        points=100 * (rows["test"] - rows["full_test"]),
        compiled=rows["compiled"].map(lambda text: "yes" if text == "True" else ""),
        kept=rows["dominated"].map(lambda path: "" if path else "yes"),
    )


def _kernels(rows):
    """For each of `rows` the first of the codes whose kernels are those of its own: codes are joined where the full
    paths of all networks of both, and there is one, take as long, see `SAME`, and so are those that a third one joins.
    """
    alike, of_network = [name for name in ALIKE if name != "kernels"], ["network", "full"]
    full = rows[rows["path"] == rows["full"]].groupby([*alike, "code", *of_network], sort=False)["full_us"].median()
    first = {}
    for key, times in full.unstack(of_network).groupby(alike):
        codes, logs = times.index.get_level_values("code"), np.log(times.to_numpy())
        # Not a number where one of both has no such network.
        apart = np.abs(logs[:, None] - logs)
        joined = (apart <= math.log1p(SAME)).any(-1) & ~(apart > math.log1p(SAME)).any(-1)
        _, groups = csgraph.connected_components(joined)
        first |= {(*key, code): codes[np.argmax(groups == group)] for code, group in zip(codes, groups, strict=True)}
    keys = map(tuple, rows[[*alike, "code"]].to_numpy())
    return [first.get(key, key[-1]) for key in keys]


def front(rows, *, chosen="choice", seen="test"):
    """Mean IoU on scenes of `seen` of the best of `rows` by the scenes of `chosen`, over ``p50_us``: a series of the
    times from which a better one is there."""
    rows = rows.dropna(subset=["p50_us", chosen, seen])
    rows = rows.sort_values(["p50_us", chosen], ascending=[True, False], kind="stable")
    return rows[rows[chosen] > rows[chosen].cummax().shift(fill_value=-np.inf)].set_index("p50_us")[seen]


def at(front, times_us):
    """Mean IoU of a `front` at times in microseconds; 0 before its first."""
    return np.array([0, *front])[np.searchsorted(front.index, times_us, side="right")]


def area(*fronts, slowest_us):
    """Area below all of `fronts`, in mean IoU times microseconds: their hypervolume, for which the reference point is a
    mean IoU of 0 at `slowest_us`."""
    times = np.unique([time for front in fronts for time in front.index if time < slowest_us])
    return float(np.min([at(front, times) for front in fronts], axis=0) @ np.diff([*times, slowest_us]))


def static(rows, recipes=training.STATIC):
    """The full paths of what `recipes` trained, among `rows` of `table`: one for each network, recipe and rung."""
    recipe = rows["case"].str.rpartition(".")[2]
    whole = recipe.isin(recipes) & (rows["case"] == rows["network"] + "." + recipe)
    return rows[whole & (rows["path"] == rows["full"])].drop_duplicates(["case", "rung"])


def equal(*cases):
    """Recipes of the static networks whose training equals that of `cases`, or of those that trained longest."""
    recipes = {re.match("[a-z]*", case.rpartition(".")[2])[0] for case in cases}
    return tuple(sorted({EQUAL[name] for name in recipes if name in EQUAL} or recipes))


def static_alike(rows, case):
    """Mean IoU on test scenes, weights as trained, of the full path of the static network whose training equals that of
    the rows `case`: their own, or another one among `rows` of `table`. Not a number where that was not measured.

    It is the same at any batch.
    """
    first = case.iloc[0]
    (recipe,) = equal(first["case"])
    other = recipe in EQUAL.values()
    name, rung = (f"{first['network']}.{recipe}", "trained") if other else (first["case"], first["rung"])
    found = rows[(rows["case"] == name) & (rows["rung"] == rung) & (rows["data"] == first["data"])]
    return found.loc[found["path"] == found["full"], "test"].max()


def static_front(static):
    """`front` of `static` networks in their best form, chosen by the test scenes themselves: of few networks it is
    known which sees more, and no runner of paths is let off by scenes of ``choice`` that rank them otherwise."""
    return front(static, chosen="test")


def against_static(rows, static, slowest_us=None):
    """Mean IoU on test scenes of the front of `rows`, ``ours``, and of `static_front`, ``theirs``, at equal times in
    microseconds: one row per time where either has another, from the first at which both have one to
    `slowest_us`, or to the last of `static`. There is no row where static networks are no front, for want of two."""
    import pandas as pd

    ours, theirs = front(rows), static_front(static)
    if len(theirs) < 2:
        return pd.DataFrame({"ours": [], "theirs": []})
    times = np.union1d(ours.index, theirs.index)
    times = times[(times >= max(ours.index[0], theirs.index[0])) & (times <= (slowest_us or theirs.index[-1]))]
    return pd.DataFrame({"ours": at(ours, times), "theirs": at(theirs, times)}, index=times)
