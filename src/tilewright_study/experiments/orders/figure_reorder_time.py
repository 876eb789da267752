"""What each order costs in time as the graph grows, and the gathered work that it leaves."""

import itertools

from tilewright_study.experiments.orders import table_reorder_time
from tilewright_study.figures import _style
from tilewright_study.tables import _read

# One for each kind of graph, and what it is called.
_MARKERS, _MARKS = "os^D", ("circles", "squares", "triangles", "diamonds")


def needs(config):
    """What the table of the same name needs."""
    return table_reorder_time.needs(config)


def draw(inputs):
    """Two log-log panels over tokens, a line per order and kind of graph: milliseconds, and pairs gathered by 64-row
    slices."""
    frame = table_reorder_time.table(inputs)
    # A line joins the resolutions of a pattern.
    frame["kind"] = frame["model"].str.replace(r"-\d+", "", regex=True)
    orders = _style.sorted_orders(frame["reorder"])
    drawn = _style.figure(9.2, 4.2)
    left, right = drawn.subplots(1, 2)
    for order in orders:
        for place, (_, rows) in enumerate(frame[frame["reorder"] == order].groupby("kind", sort=False)):
            line = {
                "marker": _MARKERS[place % len(_MARKERS)],
                "markersize": 4.5,
                "color": _style.order_colour(order, orders),
                "label": "_" * (place > 0) + _style.order_name(order),
            }
            left.plot(rows["tokens"], 1e3 * rows["seconds"], **line)
            right.plot(rows["tokens"], rows["work_fraction"], **line)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.minorticks_off()
        _style.plain_ticks(axes.xaxis)
        _style.plain_ticks(axes.yaxis)
    handles = [line for line in left.lines if not line.get_label().startswith("_")]
    left.set(ylabel="time to order (ms)", title="Time")
    right.set(ylabel="gathered pairs / dense pairs", title="Work left to 64-row slices")
    _style.head(drawn, "What an order costs and what it leaves", handles)
    kinds = zip(dict.fromkeys(frame["kind"]), itertools.cycle(_MARKS))
    names = ", ".join(f"{kind} ({mark})" for kind, mark in kinds)
    facts = f"Most memory of any order: {frame['peak_gib'].max():.2f} GiB. Device: {_read.devices(frame)}."
    _style.notes(drawn, [f"Graphs: {names}. {facts}"])
    return drawn
