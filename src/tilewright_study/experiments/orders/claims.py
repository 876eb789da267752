"""What is claimed of the experiment `orders`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.orders import table_reorder_time
from tilewright_study.tables._values import by_name


def _gathered_over_window(frame, case):
    """How much more an order found from the graph alone gathers than the window order, in percent."""
    window = frame[frame["reorder"] == "window"].set_index("model")["work_fraction"]
    rows = frame[frame["reorder"] == case]
    more = 100 * (rows["work_fraction"] / rows["model"].map(window) - 1)
    return by_name(rows.assign(more=more), "more", "model", "reorder")


def _reorder_s(frame, tokens):
    """Seconds that each order takes for graphs of at least so many tokens."""
    rows = frame[frame["tokens"] >= float(tokens)]
    return by_name(rows, "seconds", "model", "reorder")


MEASURES = {
    "gathered_over_window": (table_reorder_time.table, _gathered_over_window),
    "reorder_s": (table_reorder_time.table, _reorder_s),
}
