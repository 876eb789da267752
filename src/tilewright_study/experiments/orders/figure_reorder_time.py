"""What each order costs in time as the graph grows, and the gathered work that it leaves."""

from tilewright_study.experiments.orders import table_reorder_time
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of the same name needs."""
    return table_reorder_time.needs(config)


def draw(inputs):
    """Two log-log panels over tokens, a line per order: milliseconds, and pairs gathered by 64-row slices, of the kind
    of graph that was ordered at most sizes."""
    frame = table_reorder_time.table(inputs).dropna(subset="seconds")
    if frame.empty:
        return _style.nothing("What an order costs and what it leaves", [])
    # A line joins the resolutions of a pattern.
    kinds = frame["model"].str.replace(r"-\d+", "", regex=True)
    sizes = frame.groupby(kinds)["tokens"].agg(["nunique", "max"]).sort_values(["nunique", "max"])
    frame = frame[kinds == sizes.index[-1]]
    orders = _palette.in_order(frame["reorder"], "orders")
    drawn = _style.figure(3.5)
    panels = drawn.subplots(1, 2)
    texts = (("seconds", 1e3, "time to order (ms)"), ("work_fraction", 100, "pairs left to gather (% of dense)"))
    for axes, (column, factor, label) in zip(panels, texts, strict=True):
        for order in orders:
            rows, look = frame[frame["reorder"] == order], _palette.look(order, "orders")
            axes.plot(rows["tokens"], factor * rows[column], label=look.label, **look.line)
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_title(label, loc="left")
        _style.log_ticks(axes.xaxis, frame["tokens"])
        _style.plain_ticks(axes.yaxis)
    _style.head(drawn, _finding(frame), panels[0].lines)
    model = frame["model"].iloc[-1].partition("-")[2]
    _style.notes(drawn, f"Masks of {model} and the like, one core of {_read.devices(frame)}.")
    return drawn


def _finding(frame):
    """The fastest and the slowest order of the largest graph that all were asked to order."""
    most = frame["tokens"].max()
    found = frame[(frame["tokens"] == most) & (frame["reorder"] != "none")]
    if found.empty:
        return "What an order costs and what it leaves"
    found = found.sort_values("seconds")
    least, last = found.iloc[0], found.iloc[-1]
    said = (
        f"{_style.order_name(least['reorder'])} orders {most:,.0f} tokens in {_style.duration(1e6 * least['seconds'])}"
    )
    if len(found) > 1:
        said += f", {_style.order_name(last['reorder'])} in {_style.duration(1e6 * last['seconds'])}"
    return said[0].upper() + said[1:]
