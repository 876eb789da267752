"""A pass of a video network in parts, attention, choosing and the rest, by kind of attention.

One pass of a video network in parts: attention, the choosing of keys, and the rest. Beside each bar stand the speed-up
over dense attention, the share of keys that lists keep, and the products of the pass over those with dense attention.
"""

import numpy as np

from tilewright_study.experiments.video import table_video
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read

PARTS = {
    "rest_us": ("the rest", _style.PALE),
    "attend_us": ("attention", _contenders.BLUE),
    "predict_us": ("choosing keys", "#D55E00"),
}


def needs(config):
    """What the table needs."""
    return table_video.needs(config)


def draw(inputs):
    """A panel for each network and mode, a bar for each attention."""
    from matplotlib.patches import Patch

    frame = table_video.table(inputs)
    panels = list(frame.groupby(["case", "mode"], sort=False))
    heights = [1 + 0.5 * len(rows) for _, rows in panels]
    drawn = _style.figure(8.6, 1.6 + 0.72 * sum(heights))
    axes = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for own, ((case, mode), rows) in zip(axes, panels, strict=True):
        _bars(own, rows)
        weights = ", ".join(dict.fromkeys(rows["weights"])) or "no weights"
        tokens = "" if rows["tokens"].isna().all() else f", {rows['tokens'].iloc[0]:,.0f} tokens"
        own.set_title(f"{case}{tokens}, weights: {weights}, {mode or 'not run'}")
    axes[-1].set_xlabel("a pass (ms)")
    handles = [Patch(color=colour, label=name) for name, colour in PARTS.values()]
    _style.head(drawn, "One pass of a video network", handles)
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}, {', '.join(sorted(set(frame['dtype']) - {''}))}. Attention and choosing are "
            "those of all layers, timed by themselves; the rest is what is left of a pass. Beside a bar: speed-up over "
            "dense attention, the share of the keys that lists keep, and the products of a pass over those with dense "
            "attention. Attention was checked against float64 over its lists, and lists of all keys against dense "
            "attention, before anything was timed. Weights that are random say nothing about what lists lose.",
        ],
    )
    return drawn


def _bars(axes, rows):
    """A bar for each row, the first on top."""
    places = np.arange(len(rows))
    if rows["p50_us"].isna().all():
        _style.nothing(axes, "; ".join(dict.fromkeys(rows["reason"])))
        return
    left = np.zeros(len(rows))
    for column, (_, colour) in PARTS.items():
        # What compiled code does not do twice may come out below zero.
        width = rows[column].fillna(0).clip(lower=0).to_numpy() / 1e3
        axes.barh(places, width, left=left, color=colour, height=0.68)
        left += width
    for place, row, end in zip(places, rows.itertuples(), left, strict=True):
        axes.text(end, place, "  " + _said(row), va="center", fontsize=8)
    names = [_named(row) for row in rows.itertuples()]
    axes.set_yticks(places, names)
    axes.set(xlim=(0, 1.7 * max(left.max(), 1e-3)), ylim=(len(rows) - 0.4, -0.6))
    axes.grid(False, axis="y")


def _named(row):
    every = f", lists every {row.every:.0f} passes" if row.every > 1 else ""
    return f"{row.attention}{every}"


def _said(row):
    """What stands beside a bar."""
    if np.isnan(row.p50_us):
        return f"{row.status}: {row.reason}"[:60]
    kept = "" if np.isnan(row.density) else f", {row.density:.0%} of keys, {row.flops_share:.0%} of products"
    return f"{row.p50_us / 1e3:,.1f} ms, {_style.ratio(row.speedup)}{kept}"
