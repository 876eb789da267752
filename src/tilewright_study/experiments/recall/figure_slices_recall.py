"""Share of attention that lists keep over the share of keys: slices and blocks, choosers, orders of the tokens.

Share of attention kept over share of keys kept, each source of maps by itself: lists of single keys against lists of
blocks, predictors against the exact shares, and orders of the tokens. Planted maps say nothing about what trained
networks attend to.
"""

from tilewright_study.experiments.recall import table_recall
from tilewright_study.experiments.slices import ORACLE, SLICE
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read

ORDERS = {"hilbert": (_contenders.BLUE, "o"), "voxel": ("#E69F00", "s"), "raster": ("#5A5A5A", "D")}


def needs(config):
    """What the table needs."""
    return table_recall.needs(config)


def draw(inputs):
    """A row of panels per case: shapes of groups, choosers, and orders of tokens where there are several."""
    frame = table_recall.table(inputs)
    lists = frame[(frame["chosen_by"] != "") & frame["provider"].isin(["", "tilewright"]) & (frame["status"] == "ok")]
    cases = list(lists.groupby("case", sort=False))
    columns = 3 if lists["token_order"].nunique() > 1 else 2
    drawn = _style.figure(3.4 * columns, 1.2 + 4.0 * len(cases))
    rows_of = drawn.subplots(len(cases), columns, squeeze=False, sharex="row", sharey=True)
    for panels, (case, rows) in zip(rows_of, cases, strict=True):
        first = rows["token_order"].iloc[0]
        exact, main = rows[rows["chosen_by"] == ORACLE], rows[rows["token_order"] == first]
        groups = {
            name.replace("x", "×"): own
            for name, own in exact[exact["token_order"] == first].groupby("group", sort=False)
        }
        looks = {name.replace("x", "×"): (colour, "o") for name, colour in _contenders.GROUPS.items()}
        _lines(panels[0], groups, looks, "shape of groups", f"{case}\nslices and blocks")
        chosen = main[(main["group"] == SLICE) | (main["chosen_by"] != ORACLE)]
        choosers = dict(list(chosen.groupby(["chosen_by", "group"], sort=False)))
        looks = {_chooser(*key): _contenders.chooser(key[0]) for key in choosers}
        _lines(panels[1], {_chooser(*key): own for key, own in choosers.items()}, looks, "chosen by", "choosers")
        if columns == 3:
            in_orders = dict(list(exact[exact["group"] == SLICE].groupby("token_order", sort=False)))
            _lines(panels[2], in_orders, ORDERS, "order of tokens", "orders")
        panels[0].set_ylabel("recall: share of attention kept")
        # From nothing on where some keep little, so that twice as many keys lie twice as far.
        least, most = 100 * rows["density"].min(), 100 * rows["density"].max()
        panels[0].set_xlim(0 if least < 40 else least - 2, most + 2)
    _style.head(drawn, "Attention kept over keys kept")
    maps, dtypes = (", ".join(sorted(set(frame[name]))) for name in ("maps", "dtype"))
    _style.notes(
        drawn,
        [
            f"Maps: {maps}; {dtypes}, {_read.devices(frame)}. Recall is measured from log-sum-exps, the "
            "mean over all queries of all heads. Keys are chosen by the exact shares of each group, but for choosers. "
            f"Slices and blocks, and choosers: tokens in the order {frame['token_order'].iloc[0]}. Planted maps say "
            "nothing about what trained networks attend to.",
        ],
    )
    return drawn


def _chooser(name, group):
    """What a line of choosers is called."""
    said = "exact shares" if name == ORACLE else name
    return said if group == SLICE else f"{said}, {group.replace('x', '×')}"


def _lines(axes, lines, looks, title, heading):
    """A line for each of `lines`, ``{label: rows}``, with the colour and the mark that `looks` has for it."""
    for name, rows in lines.items():
        rows = rows.sort_values("density")
        colour, marker = looks.get(name) or _contenders.chooser(name)
        axes.plot(100 * rows["density"], rows["recall"], marker=marker, markersize=4, color=colour, label=name)
    axes.set(xlabel="keys kept (%)")
    axes.set_title(heading, loc="left")
    # Lines leave no corner free.
    axes.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
