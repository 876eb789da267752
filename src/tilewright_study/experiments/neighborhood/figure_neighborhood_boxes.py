"""Boxes of queries of neighbourhood attention: the time of all that were tried over that of the chosen one."""

from tilewright_study.experiments.neighborhood import table_neighborhood_boxes
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of the same name needs."""
    return table_neighborhood_boxes.needs(config)


def draw(inputs):
    """A line for each layer, a mark for each box."""
    frame = table_neighborhood_boxes.table(inputs)
    others = frame[(frame["over_chosen"] > 0) & ~frame["is_chosen"]]
    if others.empty:
        return _style.nothing("Boxes of queries of neighbourhood attention", frame["reason"])
    layers = list(dict.fromkeys(others["case"]))[::-1]
    drawn = _style.figure(0.24 * len(layers) + 1.7)
    axes = drawn.subplots()
    axes.axvline(1, color=_palette.BLUE, linewidth=2)
    places = [layers.index(case) for case in others["case"]]
    axes.plot(others["over_chosen"], places, linestyle="", marker="o", markersize=4.5, alpha=0.6, color=_palette.DENSE)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    best = others.loc[others.groupby("case")["over_chosen"].idxmin()]
    for x, case in zip(best["over_chosen"], best["case"], strict=True):
        box = others.loc[(others["case"] == case) & (others["over_chosen"] == x), "box"].iloc[0]
        axes.annotate(
            box, (x, layers.index(case)), (0, 5), textcoords="offset points", ha="center", color=_style.SOFT, bbox=white
        )
    axes.set_yticks(range(len(layers)), layers)
    axes.set(xlabel="time over that of the chosen box (×)", xscale="log", ylim=(-0.6, len(layers) - 0.2))
    _style.ratio_ticks(axes.xaxis)
    _style.head(drawn, _finding(others))
    _style.notes(drawn, f"The fastest other box is named. {_read.devices(others)}, {others['dtype'].iloc[0]}.")
    return drawn


def _finding(others):
    """How far the chosen box is from the fastest, at most."""
    over = 1 / others.groupby("case")["over_chosen"].min()
    if over.max() <= 1:
        return f"The chosen box is the fastest of those tried in all {len(over)} layers"
    return f"The chosen box takes at most {over.max() - 1:.0%} longer than the fastest, in {len(over)} layers"
