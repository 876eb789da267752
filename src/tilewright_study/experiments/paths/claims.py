"""What is claimed of the experiment `paths`: the measures of its claims, see `tables.claims`."""

import numpy as np
import pandas as pd

from tilewright_study.experiments.paths import table_paths
from tilewright_study.tables._values import by_name, cases


def _path_saving(frame, case):
    """The most time, in percent of the full path's, that a path saves on the rung of a case and is at most so many
    points of mean IoU below the full path of `static_alike`: ``<points>/<rung>/<case>``; nothing where even the
    full path is further below. Paths that scenes of ``choice`` rule out are not counted, since no runner picks them,
    nor is folding the full path's decoder, which leaves nothing out."""
    points, rung, name = case.split("/")
    rows = frame[(frame["case"] == name) & (frame["rung"] == rung)]
    if not len(rows):
        return ()
    static = table_paths.static_alike(frame, rows)
    rows = rows[(rows["kept"] == "yes") | (rows["path"] == rows["full"])]
    decoder = [rows[column].str.extract(r"decoder=(\w+)", expand=False) for column in ("path", "full")]
    rows = rows[decoder[0] == decoder[1]]
    found = rows[100 * (rows["test"] - static) >= -float(points)].nsmallest(1, "time_over")
    if not len(found):
        return cases([np.nan if np.isnan(static) else 0.0], ["no path"])
    return by_name(found.assign(saved=100 * (1 - found["time_over"])), "saved", "path")


def _path_error_us(frame, name):
    """The median error of predicted times, in percent, of paths that no model of time was fitted to."""
    rows = frame[(frame["case"] == name) & frame["part"].isin(["seen", "proposed", "every"])].dropna(subset="p50_us")
    error = 100 * (rows["predicted_us"] / rows["p50_us"] - 1).abs()
    return cases([error.median()], [name]) if len(rows) else ()


def _path_error_points(frame, name):
    """The median error of predicted mean IoU, in points, of paths that were held out in cross-validation."""
    rows = frame[(frame["case"] == name)].dropna(subset="loss_error").drop_duplicates(["rung", "base"])
    return by_name(rows.assign(error=100 * rows["loss_error"]), "error", "rung", "base")


def _path_plan_s(frame, name):
    """Seconds of all solvers, for all budgets."""
    rows = frame[frame["case"] == name].dropna(subset="plan_seconds").drop_duplicates("rung")
    return by_name(rows, "plan_seconds", "rung")


def _path_static(frame, name):
    """The least points of mean IoU by which the table of a network is above static ones of equal training at equal
    time, up to its best path or to the full path of that network, whichever is slower."""
    frame = frame[frame["rung"] == "trained"]
    rows = frame[frame["case"] == name]
    if not len(rows):
        return ()
    alike = frame[(frame[table_paths.ALIKE] == rows[table_paths.ALIKE].iloc[0]).all(axis=1)]
    # Of every recipe: its times scatter, and the static network of the same size is to be among those compared.
    full = alike[(alike["network"] == rows["network"].iloc[0]) & (alike["path"] == alike["full"])]
    kept = rows[rows["kept"] == "yes"]
    static = table_paths.static(alike, table_paths.equal(name))
    both = table_paths.against_static(kept, static, max(kept["p50_us"].max(), full["p50_us"].max()))
    return _at_time("idxmin", [100 * (both["ours"] - both["theirs"])])


def _path_between(frame, resolution):
    """The most points of mean IoU by which the tables of all networks of a resolution are above static ones of equal
    training at a time between two of these, for each of `ALIKE`. Fronts are steps: what holds at the time of the
    faster holds right after it, too."""
    rows = frame[(frame["resolution"] == resolution) & (frame["rung"] == "trained")]
    groups = rows.groupby(table_paths.ALIKE, sort=False)
    found = [
        table_paths.against_static(
            alike[alike["kept"] == "yes"], table_paths.static(alike, table_paths.equal(*alike["case"]))
        )
        for _, alike in groups
    ]
    return _at_time("idxmax", [100 * (both["ours"] - both["theirs"]) for both in (each.iloc[:-1] for each in found)])


def _at_time(which, found):
    """Of each series over microseconds the value at ``idxmin`` or ``idxmax``; none of one that is empty."""
    places = [getattr(values, which)() if len(values) else None for values in found]
    values = [np.nan if place is None else values[place] for values, place in zip(found, places, strict=True)]
    return cases(values, ["" if place is None else f"at {place:,.0f} µs" for place in places])


def _path_full(frame, name):
    """Points of mean IoU on test scenes that the full path of a case is below that of `static_alike`: what a
    network loses where its training is spent on paths."""
    rows = frame[(frame["case"] == name) & (frame["rung"] == "trained") & (frame["path"] == frame["full"])].head(1)
    return cases(100 * (table_paths.static_alike(frame, rows) - rows["test"]), rows["case"]) if len(rows) else ()


def _path_folded(frame, name):
    """Time, in percent of the full path's with the published decoder, that the folded one saves."""
    rows = frame[(frame["case"] == name) & (frame["rung"] == "trained")]
    published = rows[rows["path"] == rows["full"].str.replace("decoder=folded", "decoder=published")]
    full = rows[rows["path"] == rows["full"]]
    return by_name(full.assign(saved=100 * (1 - full["p50_us"] / published["p50_us"].min())), "saved", "path")


def _path_true_front(frame, name):
    """Share, in percent, of the area below the front of all sets of blocks of a base that is below the front of what
    planners proposed for any base, too: on each rung where all sets were measured.

    On scenes of ``fit``, which planners plan for, and which alone all sets see: random sets are not measured on those
    of ``choice``. The base counts as proposed; a proposal counts if it has a promise, as what a table holds.
    """
    found = {}
    for rung, rows in frame[frame["case"] == name].groupby("rung", sort=False):
        bases = rows.loc[rows["part"] == "every", "base"]
        if len(bases):
            every = rows[rows["base"] == bases.iloc[0]]
            proposed = rows["proposed"].astype(bool) & rows["promise_us"].notna()
            reached = rows[proposed | (rows["path"] == bases.iloc[0])]
            true, ours = (table_paths.front(these, chosen="fit", seen="fit") for these in (every, reached))
            slowest_us = every["p50_us"].max()
            share = table_paths.area(true, ours, slowest_us=slowest_us) / table_paths.area(true, slowest_us=slowest_us)
            found[rung] = 100 * share
    return cases(list(found.values()), found)


def _each(values):
    """Of all cases whose names end so: what comes before the last ``/`` of a claim's case is asked of each."""

    def of_all(frame, case):
        rest, slash, name = case.rpartition("/")
        names = [each for each in dict.fromkeys(frame["case"]) if each.endswith(name)]
        found = {each: values(frame, f"{rest}{slash}{each}") for each in names}
        found = [
            rows.set_axis([*rows.index] if each == name else [f"{each} {where}" for where in rows.index])
            for each, rows in found.items()
            if len(rows)
        ]
        return pd.concat(found) if found else ()

    return of_all


MEASURES = {
    "path_saving": (table_paths.table, _each(_path_saving)),
    "path_error_us": (table_paths.measured, _path_error_us),
    "path_error_points": (table_paths.measured, _path_error_points),
    "path_plan_s": (table_paths.measured, _path_plan_s),
    "path_static": (table_paths.table, _each(_path_static)),
    "path_between": (table_paths.table, _path_between),
    "path_full": (table_paths.table, _path_full),
    "path_folded": (table_paths.table, _each(_path_folded)),
    "path_true_front": (table_paths.measured, _path_true_front),
}
