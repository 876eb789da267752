"""Predicted against measured latency of every schedule that ran, and how the errors are distributed; the band is
±30 %, the numbers the median error and the 90th percentile."""

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study.experiments.attention import table_prediction
from tilewright_study.figures import _style

_MARKERS = ("o", "s", "^", "v", "P", "X")
_BAND = 0.3
_POLICIES = {"greedy": "greedy", "descent": "local search", "published": "ILP, published", "ilp": "ILP"}


def needs(config):
    """What the table of the same name needs."""
    return table_prediction.needs(config)


def draw(inputs):
    """A log-log scatter, colour by order, mark by family, hollow for greedy; beside it the errors of each family.

    Raises `ArtifactError` when no schedule has both a prediction and a timing.
    """
    frame = table_prediction.table(inputs)
    if frame.empty:
        raise ArtifactError("expected at least one schedule that was predicted and timed, found none")
    drawn = _style.figure(11.2, 5.4)
    points, errors = drawn.subplots(1, 2, width_ratios=[1, 0.85])
    orders, families = _style.sorted_orders(frame["reorder"]), list(dict.fromkeys(frame["family"]))
    _scatter(points, frame, orders, families)
    _errors(errors, frame, families)
    _style.head(drawn, "Schedules: predicted against measured latency", _handles(orders, families))
    return drawn


def _scatter(axes, frame, orders, families):
    """Predicted over measured milliseconds."""
    times = frame[["predicted_us", "p50_us"]] / 1e3
    span = np.array([times.min(axis=None) / 1.5, times.max(axis=None) * 1.5])
    axes.fill_between(span, span * (1 - _BAND), span * (1 + _BAND), color=_style.PALE, alpha=0.6, linewidth=0)
    axes.plot(span, span, color=_style.DENSE, linewidth=1)
    greedy = frame["policy"] == "greedy"
    for (order, family, hollow), rows in times.groupby([frame["reorder"], frame["family"], greedy], sort=False):
        colour = _style.order_colour(order, orders)
        marker = _MARKERS[families.index(family) % len(_MARKERS)]
        face = "none" if hollow else colour
        style = {"markersize": 5.5, "markeredgecolor": colour, "markerfacecolor": face}
        axes.plot(rows["p50_us"], rows["predicted_us"], marker, **style)
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set(xlabel="measured p50 (ms)", ylabel="predicted (ms)", title="Each schedule")
    for axis in (axes.xaxis, axes.yaxis):
        _style.plain_ticks(axis)


def _errors(axes, frame, families):
    """Boxes of the relative errors, by family and by what found the schedule."""
    names = {family: _style.layer_name(family).replace(" ", "\n") for family in families}
    kinds = [kind for kind in _POLICIES if kind in set(frame["policy"])]
    shown = frame.assign(
        percent=100 * frame["error"], family=frame["family"].map(names), policy=frame["policy"].map(_POLICIES)
    )
    axes.axvspan(-100 * _BAND, 100 * _BAND, color=_style.PALE, alpha=0.6, linewidth=0)
    axes.axvline(0, color=_style.DENSE, linewidth=1)
    _style.boxes(
        axes,
        shown,
        x="percent",
        y="family",
        hue="policy",
        order=list(names.values()),
        hue_order=[_POLICIES[kind] for kind in kinds],
        palette=dict(zip(_POLICIES.values(), ("#FFFFFF", "#A9C7DE", "#5A9BCB", "#0072B2"), strict=True)),
        width=0.7,
    )
    error = frame["error"].abs()
    axes.set_title(
        f"relative error: median {error.median():.1%}, 90th percentile {error.quantile(0.9):.1%}\n"
        f"within ±{_BAND:.0%}: {(error <= _BAND).mean():.0%} of {len(frame)} schedules"
    )
    axes.set(xlabel="predicted / measured − 1 (%); box: quartiles, whiskers: 10 to 90 %", ylabel="")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="best", title=None)


def _handles(orders, families):
    from matplotlib.lines import Line2D

    mark = {"linestyle": "none", "marker": "o", "color": _style.DENSE}
    handles = [
        Line2D([], [], **mark | {"color": _style.order_colour(order, orders)}, label=_style.order_name(order))
        for order in orders
    ]
    handles += [
        Line2D([], [], **mark | {"marker": _MARKERS[place % len(_MARKERS)]}, label=_style.layer_name(family))
        for place, family in enumerate(families)
    ]
    return [*handles, Line2D([], [], **mark, markerfacecolor="none", label="hollow: greedy")]
