"""Lines of the contenders of packed attention and of pruned networks: one colour each, ours the blue of all figures."""

import math
import zlib

from tilewright.networks.batching import UNPRUNED
from tilewright_study.baselines.packed import _labels as packed
from tilewright_study.figures import _networks

# Panels side by side.
ACROSS = 4
BLUE = "#0072B2"
# By provider and by batching: what each family says of its members. Ours come first, in legends as well.
OURS = {"tilewright": "Tilewright", "ragged": _networks.BATCHINGS["ragged"]}
LABELS = {**OURS, UNPRUNED: "not pruned", **_networks.BATCHINGS, **packed.LABELS}
COLOURS = {**dict.fromkeys(OURS, BLUE), UNPRUNED: "#882255", **_networks.COLOURS, **packed.COLOURS}
# Attention by lists: shapes of groups, who chose the keys, with a mark, and who attends to whole blocks.
GROUPS = {"128x1": BLUE, "64x1": "#56B4E9", "128x16": "#009E73", "128x64": "#D55E00", "128x128": "#882255"}
CHOOSERS = {
    **{"oracle": (BLUE, "o"), "pooled32": ("#CC79A7", "s"), "pooled128": ("#999933", "D")},
    **{"column": ("#117733", "v"), "blocks": ("#D55E00", "^")},
}
BLOCKED = {"flex": ("#5A5A5A", "o"), "fa4": ("#E69F00", "s"), "flashinfer": ("#8C564B", "D")}
# A member that says nothing of itself bears its name, in one of these.
_FURTHER = ("#44AA99", "#999933", "#117733", "#AA4499")


def label(name):
    """What a contender is called in figures."""
    return LABELS.get(name, name)


def colour(name, known=()):
    """Colour of a contender. Those without one take further ones, by their place in `known`."""
    further = sorted(set(known) - set(COLOURS))
    return COLOURS.get(name) or _FURTHER[further.index(name) % len(_FURTHER) if name in further else 0]


def further(name):
    """Colour of a name that no palette holds: the same in every figure, whoever else is in it."""
    return _FURTHER[zlib.crc32(name.encode()) % len(_FURTHER)]


def chooser(name):
    """Colour and mark of who chooses keys."""
    return CHOOSERS.get(name) or (further(name), "<")


def in_order(names):
    """`names` of contenders, once each: ours first, then by family, then others by name."""
    known = list(LABELS)
    return sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))


def line_style(name, known=()):
    """Colour, label and weight of a contender's line; `known` as in `colour`."""
    ours = name in OURS
    return {
        "color": colour(name, known),
        "label": label(name),
        "marker": "o",
        "markersize": 4,
        "linewidth": 2 if ours else 1.2,
        "zorder": 3 if ours else 2,
    }


def grid(count, height, xlabel, **shared):
    """``(figure, panels)``: `count` panels of speed-ups over padding, `ACROSS` side by side.

    height: of a row, in inches. shared: arguments of ``Figure.subplots``.
    """
    from tilewright_study.figures import _style

    across = min(ACROSS, count)
    down = math.ceil(count / across)
    drawn = _style.figure(max(9.6, 3.1 * across), 1.7 + height * down)
    rows = drawn.subplots(down, across, squeeze=False, **shared)
    panels = rows.flat[:count]
    for axes in rows.flat[count:]:
        axes.set_axis_off()
    # The last panel of each column is the lowest.
    for axes in panels[-across:]:
        axes.set_xlabel(xlabel)
    for axes in rows[:, 0]:
        axes.set_ylabel("× padded to the full length")
    return drawn, panels


def log_ticks(axes, values, axis="x"):
    """Make an axis logarithmic, with a tick at each of `values`."""
    values = sorted(set(values))
    axes.set(**{f"{axis}scale": "log"})
    getattr(axes, f"set_{axis}ticks")(values, [f"{value:,.0f}" for value in values])
    axes.minorticks_off()


def blanks(frame, name, where):
    """Notes on the rows of `frame` that were not measured: who, where and why. where: columns that name the case."""
    from tilewright_study.figures import _style

    blank = frame[frame["status"] != "ok"]
    # What was found differs from case to case.
    blank = blank.assign(reason=blank["reason"].astype(str).str.replace(", found from .*", "", regex=True))
    places = blank[where].astype(str).agg(" ".join, axis=1) if len(blank) else blank[name]
    return [
        f"Blank: {label(who)} ({_style.listed(places[rows.index], 3, 'cases')}): {status}, {reason}."
        for (who, status, reason), rows in blank.groupby([name, "status", "reason"], sort=False)
    ]
