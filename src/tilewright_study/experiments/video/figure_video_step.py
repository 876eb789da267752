"""A pass of a video network in parts, attention, choosing and the rest, by kind of attention.

One pass of a video network in parts: attention, the choosing of keys, and the rest. Attention and choosing are those of
all layers, timed by themselves; the rest is what is left of a pass. Beside each bar stand its time, the speed-up over
dense attention and the share of keys that lists keep. Weights that are random say nothing about what lists lose.
"""

import numpy as np

from tilewright_study.experiments.video import table_video
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

PARTS = {
    "rest_us": ("the rest", _style.PALE),
    "attend_us": ("attention", _palette.BLUE),
    "predict_us": ("choosing keys", _style.PAPER),
}
# Networks that are shown, those with most tokens.
_MOST = 3


def needs(config):
    """What the table needs."""
    return table_video.needs(config)


def draw(inputs):
    """A panel for each network, a bar for each attention, from most keys to fewest."""
    from matplotlib.patches import Patch

    frame = table_video.table(inputs)
    timed = frame[frame["p50_us"] > 0]
    if timed.empty:
        return _style.nothing("A pass of a video network", frame["reason"])
    # The faster mode of each network.
    fastest = timed.groupby(["case", "tokens", "mode"], sort=False)["p50_us"].min().sort_values()
    fastest = fastest.reset_index().drop_duplicates(["case", "tokens"]).sort_values("tokens", kind="stable")[-_MOST:]
    panels = [
        timed[(timed["case"] == row.case) & (timed["tokens"] == row.tokens) & (timed["mode"] == row.mode)]
        for row in fastest.itertuples()
    ]
    heights = [1 + len(rows) for rows in panels]
    drawn = _style.figure(1.1 + 0.27 * sum(heights))
    for axes, rows in zip(
        drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0], panels, strict=True
    ):
        _bars(axes, rows.assign(kept=rows["density"].fillna(1)).sort_values("kept", ascending=False, kind="stable"))
        first = rows.iloc[0]
        weights = "random weights" if "random" in str(first["weights"]) else f"trained: {first['weights']}"
        name = f"{_style.network(first['network'])}, {first['layers']:.0f} layers"
        axes.set_title(f"{name}, {first['tokens']:,.0f} tokens, {weights}", loc="left")
    axes.set_xlabel("a pass (ms)")
    _style.head(drawn, _finding(panels[-1]), [Patch(color=colour, label=name) for name, colour in PARTS.values()])
    _style.notes(drawn, f"{_read.devices(frame)}, {timed['dtype'].iloc[0]}. Beside a bar: time, speed-up over dense.")
    return drawn


def _finding(rows):
    """The fastest lists of the largest network."""
    lists = rows[rows["ours"] & (rows["speedup"] - rows["noise"].fillna(0) > 1) & rows["density"].notna()]
    if lists.empty:
        return f"Lists of keys make a pass of {rows['tokens'].iloc[0]:,.0f} tokens no faster"
    best = lists.loc[lists["speedup"].idxmax()]
    keys, faster = _percent(1 - best["density"]), _style.times([best["speedup"]])
    return f"Without {keys} of the keys a pass of {best['tokens']:,.0f} tokens is {faster} times as fast"


def _percent(share):
    return f"{100 * share:.{1 if share > 0.99 or share < 0.01 else 0}f} %"


def _bars(axes, rows):
    """A bar for each row, the first on top."""
    places = np.arange(len(rows))
    left = np.zeros(len(rows))
    for column, (_, colour) in PARTS.items():
        # What compiled code does not do twice may come out below zero.
        width = rows[column].fillna(0).clip(lower=0).to_numpy() / 1e3
        axes.barh(places, width, left=left, color=colour, height=0.7)
        left += width
    for place, row, end in zip(places, rows.itertuples(), left, strict=True):
        said = f"{_style.duration(row.p50_us)}, {_style.ratio(row.speedup)}"
        axes.annotate(said, (end, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [_named(row) for row in rows.itertuples()])
    axes.set(xlim=(0, 1.28 * left.max()), ylim=(len(rows) - 0.4, -0.6))
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _named(row):
    kind = row.attention.rstrip("0123456789")
    return kind if np.isnan(row.density) or row.density == 1 else f"{kind}, {_percent(row.density)} of keys"
