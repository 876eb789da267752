"""Predicted against measured latency of every schedule that ran; the band is ±30 %."""

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study.experiments.attention import table_prediction
from tilewright_study.figures import _palette, _style

_BAND = 0.3


def needs(config):
    """What the table of the same name needs."""
    return table_prediction.needs(config)


def draw(inputs):
    """A log-log scatter, a colour and a mark for each family.

    Raises `ArtifactError` when no schedule has both a prediction and a timing.
    """
    frame = table_prediction.table(inputs)
    if frame.empty:
        raise ArtifactError("expected at least one schedule that was predicted and timed, found none")
    drawn = _style.figure(4.6)
    axes = drawn.subplots()
    times = frame[["predicted_us", "p50_us"]] / 1e3
    span = np.array([times.min(axis=None) / 1.5, times.max(axis=None) * 1.5])
    axes.fill_between(span, span * (1 - _BAND), span * (1 + _BAND), color=_style.PALE, alpha=0.6, linewidth=0)
    axes.plot(span, span, color=_palette.DENSE, linewidth=1)
    looks = {family: _palette.look(family, "families") for family in dict.fromkeys(frame["family"])}
    for family, rows in times.groupby(frame["family"], sort=False):
        mark = {"marker": looks[family].marker, "color": looks[family].colour, "linestyle": "none"}
        axes.plot(rows["p50_us"], rows["predicted_us"], **mark, markersize=5, markerfacecolor="none")
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set(xlabel="measured p50 (ms)", ylabel="predicted (ms)")
    for axis in (axes.xaxis, axes.yaxis):
        _style.plain_ticks(axis)
    error = frame["error"].abs()
    finding = f"Predicted times are off by {error.median():.1%} at the median of {len(frame)} schedules"
    _style.head(drawn, finding, _handles(looks))
    within = (error <= _BAND).mean()
    _style.notes(drawn, f"Band: ±{_BAND:.0%}, {within:.0%} of schedules. 90th percentile: {error.quantile(0.9):.1%}.")
    return drawn


def _handles(looks):
    from matplotlib.lines import Line2D

    names = {family: _style.layer_name(family) for family in looks}
    mark = {"linestyle": "none", "markerfacecolor": "none"}
    return [
        Line2D([], [], **mark, marker=look.marker, color=look.colour, label=names[of]) for of, look in looks.items()
    ]
