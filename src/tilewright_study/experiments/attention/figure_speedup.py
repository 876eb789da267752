"""The headline plan against dense attention for every workload, with the peers beside it."""

import re

from tilewright_study.experiments.attention import table_speedup
from tilewright_study.figures import _style
from tilewright_study.tables import _read

# Where bars stand, and the marks beside them.
_BAR_AT, _MARKS_AT = -0.14, 0.17
_MARKS = {
    "sdpa_mask": (_MARKS_AT, "v", "#882255", _style.PROVIDER_NAMES["sdpa_mask"]),
    "flex": (_MARKS_AT, "^", "#44AA99", _style.PROVIDER_NAMES["flex"]),
    "peer_speedup": (_MARKS_AT, "_", _style.INK, "fastest peer"),
    "speedup_natural": (_BAR_AT, "o", _style.DENSE, "ours, permuted inside the call"),
    "best_speedup": (_BAR_AT, "_", _style.ORDER_COLOURS["none"], "ours, best of all plans"),
}


def needs(config):
    """What the table of the same name needs."""
    return table_speedup.needs(config)


def draw(inputs):
    """One panel per family; each workload's bar goes up or down from 1, with peers as marks beside it."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator

    frame = table_speedup.table(inputs)
    frame["peer_speedup"] = frame["speedup"] / frame["over_peer"]
    frame["best_speedup"] = frame["dense_us"] / frame["best_us"]
    families = list(dict.fromkeys(frame["family"]))
    counts = [int((frame["family"] == family).sum()) for family in families]
    drawn = _style.figure(max(7.6, 1.15 * sum(counts) + 1.2), 4.9)
    panels = drawn.subplots(1, len(families), squeeze=False, sharey=True, width_ratios=counts)[0]
    names = _read.labels(frame)
    for axes, family in zip(panels, families, strict=True):
        rows = frame[frame["family"] == family].reset_index(drop=True)
        for row in rows.itertuples():
            _bar(axes, row)
        for column, (at, marker, colour, _) in _MARKS.items():
            edge = colour if marker == "_" else "white"
            axes.plot(rows.index + at, rows[column], marker, color=colour, markersize=6, markeredgecolor=edge)
        axes.axhline(1, color=_style.DENSE, linewidth=1)
        axes.set_title(_style.layer_name(family))
        numbers = [_style.ratio(row.speedup) if row.speedup > 0 else "not run" for row in rows.itertuples()]
        ticks = [f"{said}\n{_style.folded(names[model])}" for said, model in zip(numbers, rows["model"], strict=True)]
        axes.set_xticks(rows.index, ticks, fontsize=8)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("speed-up over dense, same device")
    values = frame[["speedup", *_MARKS]].where(lambda value: value > 0)
    panels[0].set_yscale("log")
    panels[0].set_ylim(0.8 * min(1, values.min(axis=None)), 1.25 * max(1, values.max(axis=None)))
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, label=label)
        for column, (_, marker, colour, label) in _MARKS.items()
        if frame[column].notna().any()
    ]
    handles.append(Line2D([], [], color=_style.DENSE, linewidth=1, label="dense, same run"))
    _style.head(drawn, "The headline plan over dense attention", handles, columns=4)
    _style.notes(
        drawn,
        [
            "Bars: "
            + ", ".join(f"{name} {value}" for name, value in _read.HEADLINE.items())
            + "; checked, tokens in plan order, warm cache, over the fastest dense attention of the same run "
            f"({_style.dense_names(frame)}; {_read.devices(frame)}); below each its number. Peers in plan order, too. "
            f"Best of up to {frame['plans'].max():.0f} plans: the least of as many measurements.",
            *(f"{_style.listed(models)}: {why}." for why, models in _reasons(frame).items()),
        ],
    )
    return drawn


def _reasons(frame):
    """``{"provider: reason": workloads}`` of what is missing."""
    found = {}
    for row in frame.itertuples():
        for why in filter(None, re.split(r"; (?=\w+: )", row.reason)):
            found.setdefault(why, []).append(row.model)
    return found


def _bar(axes, row):
    if row.speedup > 0:
        colour = _style.tint(_style.order_colour(_read.HEADLINE["reorder"]), 0.75)
        axes.bar(row.Index + _BAR_AT, row.speedup - 1, 0.42, bottom=1, color=colour)
