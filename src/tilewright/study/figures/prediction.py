"""Predicted against measured latency of every schedule that ran; the band is ±30 %, the numbers the median error
and the 90th percentile."""

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright.study.figures import _style
from tilewright.study.tables import prediction

_MARKERS = ("o", "s", "^", "v", "P", "X")
_BAND = 0.3


def needs(config):
    """What the table of the same name needs."""
    return prediction.needs(config)


def draw(inputs):
    """A log-log scatter: colour by order, mark by family, hollow for greedy.

    Raises `ArtifactError` when no schedule has both a prediction and a timing.
    """
    from matplotlib.lines import Line2D

    frame = prediction.table(inputs)
    if frame.empty:
        raise ArtifactError("expected at least one schedule that was predicted and timed, found none")
    drawn = _style.figure(7.2, 5.2)
    axes = drawn.subplots()
    orders = _style.sorted_orders(frame["reorder"])
    families = list(dict.fromkeys(frame["family"]))
    span = np.array(
        [frame[["predicted_us", "p50_us"]].min(axis=None) / 1.5, frame[["predicted_us", "p50_us"]].max(axis=None) * 1.5]
    )
    span = span / 1e3
    axes.fill_between(span, span * (1 - _BAND), span * (1 + _BAND), color=_style.PALE, alpha=0.6, linewidth=0)
    axes.plot(span, span, color=_style.DENSE, linewidth=1)
    for row in frame.itertuples():
        colour = _style.order_colour(row.reorder, orders)
        axes.plot(
            row.p50_us / 1e3,
            row.predicted_us / 1e3,
            _MARKERS[families.index(row.family) % len(_MARKERS)],
            markersize=5.5,
            markeredgecolor=colour,
            markerfacecolor="none" if row.policy == "greedy" else colour,
        )
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set(xlabel="measured p50 (ms)", ylabel="predicted (ms)")
    for axis in (axes.xaxis, axes.yaxis):
        _style.plain_ticks(axis)
    error = frame["error"].abs()
    axes.set_title("Schedules: predicted against measured latency", pad=34)
    axes.text(
        0.5,
        1.015,
        f"relative error: median {error.median():.1%}, 90th percentile {error.quantile(0.9):.1%}\n"
        f"within ±{_BAND:.0%}: {(error <= _BAND).mean():.0%} of {len(frame)} schedules",
        transform=axes.transAxes,
        ha="center",
        fontsize=9.5,
    )
    marks = [
        Line2D([], [], linestyle="none", marker="o", color=_style.order_colour(o, orders), label=_style.order_name(o))
        for o in orders
    ]
    marks += [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=_MARKERS[i % len(_MARKERS)],
            color=_style.DENSE,
            label=_style.layer_name(f),
        )
        for i, f in enumerate(families)
    ]
    marks.append(
        Line2D([], [], linestyle="none", marker="o", color=_style.DENSE, markerfacecolor="none", label="hollow: greedy")
    )
    drawn.legend(handles=marks, loc="outside right center")
    return drawn
