"""Predicted against measured time and mean IoU of paths that the models were not fitted to.

Predicted against measured time and mean IoU, for paths that the models were not fitted to. The line is where both are
equal.
"""

from tilewright_study.experiments.paths import table_paths
from tilewright_study.figures import _style
from tilewright_study.tables import _read

# Parts that nothing is fitted to: models are of single skips and of random sets of blocks. Of the latter some that are
# not timed may be proposed.
HELD = ("proposed", "every")
CROSSED = "#56B4E9"
COLOURS = {"seen": CROSSED, "proposed": "#009E73", "every": "#9A9A9A"}
NAMES = {"proposed": "proposed by a planner", "every": "any other set of blocks"}


def needs(config):
    """What the table `paths` needs."""
    return table_paths.needs(config)


def held(rows, what):
    """Rows of paths that a model was not fitted to, with ``error``: of time as a share, of mean IoU in points."""
    if what == "time":
        rows = rows[rows["part"].isin(("seen", *HELD))].dropna(subset=["predicted_us", "p50_us"])
        rows = rows.drop_duplicates(["case", "path"])
        return rows.assign(error=(rows["predicted_us"] / rows["p50_us"] - 1).abs())
    rows = rows[rows["part"].isin(HELD)].dropna(subset=["predicted", "fit"])
    return rows.assign(error=100 * (rows["predicted"] - rows["fit"]).abs())


def draw(inputs):
    """A row of panels per network: times, then mean IoU for each rung."""
    from matplotlib.lines import Line2D

    rows = table_paths.measured(inputs)
    cases = list(rows.groupby("case", sort=False))
    rungs = list(dict.fromkeys(rows["rung"]))
    drawn = _style.figure(3.9 * (1 + len(rungs)), 1.5 + 3.6 * len(cases))
    for panels, (case, own) in zip(drawn.subplots(len(cases), 1 + len(rungs), squeeze=False), cases, strict=True):
        timed = held(own, "time")
        _panel(panels[0], timed, "predicted_us", "p50_us", 1e-3, "time (ms)")
        panels[0].set_title(f"{case}\nmedian error {timed['error'].median():.1%} of {len(timed)}", loc="left")
        for axes, rung in zip(panels[1:], rungs, strict=True):
            of_rung = own[own["rung"] == rung]
            crossed = of_rung.dropna(subset="held_out")
            _panel(axes, _both(crossed, held(of_rung, "loss")), "predicted", "fit", 100, "mean IoU (%)")
            axes.set_title(_said(rung, of_rung), loc="left", fontsize=9)
    shown = [part for part in HELD if part in set(rows["part"])]
    handles = [Line2D([], [], linestyle="", marker="o", color=COLOURS[part], label=NAMES[part]) for part in shown]
    if rows["held_out"].notna().any():
        handles.insert(
            0, Line2D([], [], linestyle="", marker="o", color=CROSSED, label="random or single, held out here")
        )
    _style.head(drawn, "Predictions for paths that were not fitted to", handles)
    _style.notes(
        drawn,
        [
            f"{_read.devices(rows)}, {', '.join(sorted(set(rows['dtype'])))}. Time: the full path's less what skipped "
            "blocks save, mean IoU on scenes of fit: a quadratic form of skips or a Gaussian process, whichever errs "
            "less in cross-validation; fitted to single and random ones. Errors of mean IoU are in points.",
        ],
    )
    return drawn


def _both(crossed, others):
    """Rows of paths in cross-validation, drawn as one part, and others that models were not fitted to."""
    import pandas as pd

    return pd.concat([crossed.assign(part="seen", predicted=crossed["held_out"]), others])


def _said(rung, rows):
    """What stands above a panel of mean IoU."""
    said, errors = "as trained" if rung == "trained" else "batch norm of each path", held(rows, "loss")["error"]
    found = [f"{errors.median():.2f} of {len(errors)}"] if len(errors) else []
    if rows["loss_error"].notna().any():
        found.append(f"{100 * rows['loss_error'].median():.2f} in cross-validation")
    return f"{said}:\nmedian error {', '.join(found)}" if found else said


def _panel(axes, rows, x, y, scale, what):
    for part, own in rows.groupby("part", sort=False):
        axes.scatter(scale * own[x], scale * own[y], s=18, color=COLOURS[part])
    axes.set(xlabel=f"predicted {what}", ylabel=f"measured {what}")
    if not len(rows):
        _style.nothing(axes, "not measured")
        return
    ends = [scale * rows[[x, y]].min().min(), scale * rows[[x, y]].max().max()]
    axes.plot(ends, ends, color=_style.INK, linewidth=0.8, zorder=1)
