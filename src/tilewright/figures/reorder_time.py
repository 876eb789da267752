"""What each order costs in time as the graph grows, and the gathered work that it leaves."""

from tilewright.figures import style
from tilewright.tables import read, reorder_time


def needs(config):
    """What the table of the same name needs."""
    return reorder_time.needs(config)


def draw(inputs):
    """Two log-log panels over tokens, one line per order: milliseconds, and pairs gathered by 64-row slices."""
    frame = reorder_time.table(inputs)
    orders = style.ordered(frame["reorder"])
    drawn = style.figure(9.2, 4.2)
    left, right = drawn.subplots(1, 2)
    for order in orders:
        rows = frame[frame["reorder"] == order]
        look = {
            "marker": "o",
            "markersize": 4.5,
            "color": style.order_colour(order, orders),
            "label": style.order_name(order),
        }
        left.plot(rows["tokens"], 1e3 * rows["seconds"], **look)
        right.plot(rows["tokens"], rows["work_fraction"], **look)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_xticks(frame["tokens"].unique(), [f"{tokens:,.0f}" for tokens in frame["tokens"].unique()])
        axes.minorticks_off()
        style.plain_ticks(axes.yaxis)
    left.set(ylabel="time to order (ms)", title="Time")
    right.set(ylabel="gathered pairs / dense pairs", title="Work left to 64-row slices")
    style.head(drawn, "What an order costs and what it leaves", left.get_legend_handles_labels()[0])
    names = ", ".join(dict.fromkeys(frame["model"]))
    facts = f"Most memory of any order: {frame['peak_gib'].max():.2f} GiB. Device: {read.devices(frame)}."
    style.notes(drawn, [f"Graphs: {names}. {facts}"], width=130)
    return drawn
