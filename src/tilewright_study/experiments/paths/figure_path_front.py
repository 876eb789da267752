"""Paths of trained networks: mean IoU over time of every path that was measured, and those that a runner picks from.

Mean IoU over time for every path that was measured, and for those that a runner picks from. Hollow marks are what the
planner predicted for its proposals. The three sets of scenes share nothing: paths are not judged where they were
chosen.
"""

from tilewright_study.experiments.paths import table_paths
from tilewright_study.figures import _contenders, _paths, _style
from tilewright_study.tables import _read

PARTS = {
    "single": ("one block left out", "#56B4E9", "o"),
    "drawn": ("random set of blocks", "#BBBBBB", "o"),
    "seen": ("such a set that was proposed", "#BBBBBB", "D"),
    "earlier": ("proposed in an earlier round", "#8FD3BF", "D"),
    "every": ("any other set of blocks", "#DDDDDD", "."),
    "proposed": ("proposed by a planner", "#009E73", "D"),
    "alone": ("other size, levels or decoder", "#CC79A7", "s"),
    "base": ("all blocks", _style.INK, "X"),
}


def needs(config):
    """What the table `paths` needs."""
    return table_paths.needs(config)


def draw(inputs):
    """A row of two panels per network and rung: paths and predictions on scenes of ``fit``, promised paths on ``test``.
    Static networks, the full paths of what the recipes `training.STATIC` trained, stand in the panels of tested paths
    of other networks of the same resolution, device, type and kernels."""
    from matplotlib.lines import Line2D

    rows, promised = table_paths.measured(inputs), table_paths.table(inputs)
    static, compared = table_paths.static(promised), False
    cases = list(rows.groupby(["case", "rung"], sort=False))
    drawn = _style.figure(10.4, 1.5 + 3.5 * len(cases))
    for (left, right), ((case, rung), own) in zip(drawn.subplots(len(cases), 2, squeeze=False), cases, strict=True):
        _dots(left, own.dropna(subset=["p50_us", "fit"]), "p50_us", "fit")
        planned = own[own["part"].isin(["seen", "proposed"])].dropna(subset=["p50_us", "predicted_us", "predicted"])
        predicted = planned["held_out"].fillna(planned["predicted"])
        left.scatter(
            planned["predicted_us"] / 1e3, 100 * predicted, s=34, facecolors="none", edgecolors="#009E73",
            linewidths=0.9, zorder=4,
        )  # fmt: skip
        tested = promised[(promised["case"] == case) & (promised["rung"] == rung)]
        _dots(right, tested, "promise_us", "test")
        kept = tested[tested["kept"] == "yes"]
        right.step(
            kept["promise_us"] / 1e3,
            100 * kept["test"],
            where="post",
            color=_contenders.BLUE,
            linewidth=1.6,
            zorder=2,
            marker="|",
            markersize=9,
        )
        others = static[(static["rung"] == rung) & (static["case"] != case)]
        others = others.merge(tested[table_paths.ALIKE].drop_duplicates(), on=table_paths.ALIKE)
        compared |= len(others) > 0
        _paths.stars(right, others, "promise_ms")
        said = "as trained" if rung == "trained" else "batch norm of each path"
        left.set_title(f"{case}, {said}: scenes of fit", loc="left")
        right.set_title("promised paths: scenes of test", loc="left")
        left.set(xlabel="time (ms)", ylabel="mean IoU (%)")
        right.set(xlabel="promised time (ms)", ylabel="mean IoU (%)")
        for axes in (left, right):
            axes.set_xlim(left=0)
        if not len(tested):
            _style.nothing(right, "not measured")
    shown = [name for name in PARTS if name in set(rows["part"])]
    handles = [_mark(Line2D, *PARTS[name]) for name in shown]
    handles += [
        Line2D([], [], linestyle="", marker="o", markerfacecolor="none", color="#009E73", label="as it was predicted"),
        Line2D([], [], color=_contenders.BLUE, linewidth=1.6, label="what a runner picks from"),
    ]
    if compared:
        handles.append(_mark(Line2D, "static network, by its size", _style.PAPER, "*"))
    _style.head(drawn, "Paths of trained networks: mean IoU over time", handles, columns=4)
    _style.notes(
        drawn,
        [
            f"{_read.devices(rows)}, {', '.join(sorted(set(rows['dtype'])))}, batch "
            f"{', '.join(f'{batch:.0f}' for batch in sorted(set(rows['batch'].dropna())))}. Models of time and loss "
            "are fitted on scenes of fit, paths chosen on scenes of choice, judged on scenes of test, which share "
            "nothing. A promise is the 996th of 1,000 ordered calls, or the same share of others.",
        ],
    )
    return drawn


def _dots(axes, rows, time, accuracy):
    for name, (_, colour, marker) in PARTS.items():
        own = rows[rows["part"] == name]
        axes.scatter(own[time] / 1e3, 100 * own[accuracy], s=22, color=colour, marker=marker, zorder=3)


def _mark(line, label, colour, marker):
    return line([], [], linestyle="", color=colour, marker=marker, label=label)
