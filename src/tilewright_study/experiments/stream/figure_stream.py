"""Frames with budgets: how long the paths take that run, and what contenders miss and see in all.

Frames with budgets of time, for each trace: on the left some frames of the paths with a controller and their budgets,
crosses are frames that came late, shaded where other work loads the device; beside it, over all frames, the share of
budgets missed and the mean IoU, where a frame that came late counts 0. A camera moves, and each frame is labelled by
the path that ran. The oracle knows how long each path takes.
"""

import numpy as np

from tilewright_study.experiments.stream import DRAWN, table_stream
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Who the misses of `DRAWN` are held against, the first that was run.
_OTHERS = {"full": "the best path alone", "fixed": "one path for all"}
# Percent that an axis shows at least, also where no budget was missed.
LEAST = 1.0
_LOADED = "#F2E6D8"


def needs(config):
    """What the table of the same name needs."""
    return table_stream.needs(config)


def draw(inputs):
    """A row of panels per trace of the last network: frames of the paths with a controller, misses, mean IoU."""
    found, frames, _ = table_stream.rows(inputs)
    if found.empty:
        return _style.nothing("Frames with budgets", [])
    case = found["case"].iloc[-1]
    found, frames = (of[of["case"] == case] for of in (found, frames))
    traces = list(found.groupby("trace", sort=False))
    names = _palette.in_order(found["contender"], "runners")
    drawn = _style.figure(1.2 + (0.55 + 0.21 * len(names)) * len(traces))
    shape = {"width_ratios": (2.2, 1, 1), "squeeze": False}
    for (over, missed, seen), (trace, own) in zip(drawn.subplots(len(traces), 3, **shape), traces, strict=True):
        one = frames[(frames["trace"] == trace) & (frames["contender"] == DRAWN)]
        over.set_title(f"{trace}, {own['frames'].max():,.0f} frames", loc="left")
        if len(one):
            _frames(over, one)
        else:
            over.set_axis_off()
        own = own.set_index("contender").reindex(names)
        timely = own["timely_miou"].fillna(own["mean_miou"])
        colours = [_palette.look(name, "runners").colour for name in names]
        for axes, values, what in ((missed, own["missed"], "missed (%)"), (seen, timely, "mean IoU (%)")):
            bars = axes.barh(range(len(own)), 100 * values, color=colours)
            axes.bar_label(bars, fmt="%.1f" if axes is missed else "%.0f", fontsize=_style.LETTERS, padding=2)
            axes.set_title(what, loc="left")
            axes.set(yticks=[], xticks=[], xlim=(0, max(LEAST, 140 * values.max())))
            axes.invert_yaxis()
            axes.grid(visible=False)
        missed.set_yticks(range(len(own)), [_palette.look(name, "runners").label for name in names])
        missed.tick_params(axis="y", length=0)
    over.set_xlabel("frame")
    _style.head(drawn, _finding(found), _handles(frames))
    name = _style.network(case.partition(".")[0])
    _style.notes(
        drawn, f"{name}, {_read.devices(found)}, {found['dtype'].iloc[0]}. Late frames count as a mean IoU of 0."
    )
    return drawn


def _finding(found):
    """The share of budgets that paths with a controller miss, and that of running always the same one."""
    shares = found.groupby("contender")["missed"].agg(["min", "max"])
    other = next((name for name in _OTHERS if name in shares.index), None)
    if DRAWN not in shares.index or other is None:
        return "Frames with budgets: what is missed and seen"
    said = [" to ".join(dict.fromkeys(f"{100 * value:.1f}" for value in shares.loc[name])) for name in (DRAWN, other)]
    return f"Paths with a controller miss {said[0]} % of budgets, {_OTHERS[other]} {said[1]} %"


def _frames(axes, one):
    """Times of some frames and their budgets."""
    from tilewright_study.experiments.stream.traces import spans

    late = (one["measured_us"] > one["budget_us"]).to_numpy()
    # Frames that are told stand side by side, wherever they are in the trace.
    numbers = one["frame"].to_numpy()
    places = np.arange(len(one))
    axes.step(places, one["budget_us"] / 1e3, where="mid", color=_style.PAPER, linewidth=0.9)
    # A frame that the host lost to something else would hide all others: it stands at the edge.
    top = 1.15 * max(one["budget_us"].max(), one["measured_us"].quantile(0.98)) / 1e3
    shown = (one["measured_us"] / 1e3).clip(upper=0.97 * top).to_numpy()
    axes.scatter(places, shown, s=5, color=_palette.BLUE, zorder=3)
    axes.scatter(places[late], shown[late], s=26, marker="x", color=_style.INK, zorder=4, linewidths=1)
    for first, behind in spans(one["loaded"] > 0):
        axes.axvspan(first - 0.5, behind - 0.5, color=_LOADED, zorder=0)
    for place in np.flatnonzero(np.diff(numbers) > 1):
        axes.axvline(place + 0.5, color=_style.INK, linewidth=0.8, linestyle=":")
    axes.set(ylabel="ms", ylim=(0, top))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda place, _, numbers=numbers: _number(place, numbers))


def _handles(frames):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if frames.empty:
        return []
    handles = [
        Line2D([], [], color=_style.PAPER, linewidth=1.2, label="budget"),
        Line2D([], [], linestyle="", marker="o", markersize=4, color=_palette.BLUE, label="frame"),
        Line2D([], [], linestyle="", marker="x", color=_style.INK, label="late"),
    ]
    return [*handles, Patch(facecolor=_LOADED, label="other load")] if (frames["loaded"] > 0).any() else handles


def _number(place, numbers):
    """The frame at a place of the axis, where one stands there."""
    return f"{numbers[int(place)]:,.0f}" if place == int(place) and 0 <= place < len(numbers) else ""
