"""Share of attention that lists keep over the share of keys: slices and blocks, choosers, orders of the tokens."""

from tilewright.study.experiments.slices import ORACLE, SLICE
from tilewright.study.figures import _contenders, _style
from tilewright.study.figures.slices_speedup import COLOURS, FURTHER
from tilewright.study.tables import _read, recall

ORDER_COLOURS = {"hilbert": _contenders.BLUE, "voxel": "#E69F00", "raster": "#5A5A5A"}


def needs(config):
    """What the table needs."""
    return recall.needs(config)


def draw(inputs):
    """A row of panels per case: shapes of groups, choosers, orders of tokens."""
    frame = recall.table(inputs)
    lists = frame[(frame["chosen_by"] != "") & frame["provider"].isin(["", "tilewright"]) & (frame["status"] == "ok")]
    cases = list(lists.groupby("case", sort=False))
    drawn = _style.figure(10.2, 1.2 + 3.3 * len(cases))
    for panels, (case, rows) in zip(drawn.subplots(len(cases), 3, squeeze=False, sharey=True), cases, strict=True):
        first = rows["token_order"].iloc[0]
        exact, main = rows[rows["chosen_by"] == ORACLE], rows[rows["token_order"] == first]
        groups = {
            name.replace("x", "×"): own
            for name, own in exact[exact["token_order"] == first].groupby("group", sort=False)
        }
        colours = {name.replace("x", "×"): colour for name, colour in COLOURS.items()}
        _lines(panels[0], groups, colours, "shape of groups", f"{case}\nslices and blocks")
        choosers = {
            ("exact shares" if name == ORACLE else name): own
            for name, own in main[main["group"] == SLICE].groupby("chosen_by", sort=False)
        }
        _lines(
            panels[1], choosers, {"exact shares": _contenders.BLUE}, f"{SLICE.replace('x', '×')} chosen by", "choosers"
        )
        in_orders = dict(list(exact[exact["group"] == SLICE].groupby("token_order", sort=False)))
        _lines(panels[2], in_orders, ORDER_COLOURS, "order of tokens", "orders")
        panels[0].set_ylabel("recall: share of attention kept")
    _style.head(drawn, "Attention kept over keys kept")
    maps, dtypes = (", ".join(sorted(set(frame[name]))) for name in ("maps", "dtype"))
    _style.notes(
        drawn,
        [
            f"Maps: {maps}; {dtypes}, {_read.devices(frame)}. Recall is measured from log-sum-exps, the "
            "mean over all queries of all heads. Left and right: keys chosen by the exact shares of each group. "
            f"Left and middle: tokens in the order {frame['token_order'].iloc[0]}. Planted maps say nothing about what "
            "trained networks attend to.",
        ],
    )
    return drawn


def _lines(axes, lines, colours, title, heading):
    """A line for each of `lines`, ``{label: rows}``."""
    for place, (name, rows) in enumerate(lines.items()):
        rows = rows.sort_values("density")
        colour = colours.get(name, FURTHER[place % len(FURTHER)])
        axes.plot(100 * rows["density"], rows["recall"], marker="o", markersize=4, color=colour, label=name)
    axes.set(xlabel="keys kept (%)", xlim=(0, 100))
    axes.set_title(heading, loc="left")
    axes.legend(title=title, loc="best")
