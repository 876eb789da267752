"""What integer programming gains, measured, for each workload and order: against the best fixed tile, local search and
the plain greedy."""

from tilewright_study.experiments.attention import table_policy
from tilewright_study.figures import _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of the same name needs."""
    return table_policy.needs(config)


def draw(inputs):
    """A panel per rival: a row per workload, a dot per order with two standard errors, hollow where it is a tie. Above
    it a box of all cases."""
    from matplotlib.ticker import MaxNLocator

    frame = table_policy.table(inputs)
    models = list(_read.labels(frame))
    orders = _style.sorted_orders(frame["reorder"])
    rivals = [rival for rival in table_policy.RIVALS if frame[f"over_{rival}"].notna().any()]
    drawn = _style.figure(2.6 + 3.1 * max(1, len(rivals)), 0.36 * len(models) + 2.9)
    heights = [0.5, 0.36 * max(3, len(models))]
    boxes, panels = drawn.subplots(
        2, max(1, len(rivals)), sharex="col", sharey="row", squeeze=False, height_ratios=heights
    )
    for box, axes, rival in zip(boxes, panels, rivals, strict=False):
        for place, order in enumerate(orders):
            rows = frame[frame["reorder"] == order].dropna(subset=f"over_{rival}")
            rows = rows.assign(
                y=[models.index(name) + (place - (len(orders) - 1) / 2) * 0.14 for name in rows["model"]]
            )
            colour = _style.order_colour(order, orders)
            noise = rows[f"noise_{rival}"].fillna(0)
            axes.errorbar(rows[f"over_{rival}"], rows["y"], xerr=noise, fmt="none", ecolor=colour, elinewidth=0.8)
            for tie, some in rows.groupby(rows[f"verdict_{rival}"] == "tie"):
                face = "white" if tie else colour
                axes.plot(some[f"over_{rival}"], some["y"], "o", markersize=4.5, color=colour, markerfacecolor=face)
        over = frame[f"over_{rival}"].dropna()
        shares = frame.loc[over.index, f"verdict_{rival}"].value_counts()
        said = "{} faster, {} ties, {} slower".format(*(shares.get(v, 0) for v in ("faster", "tie", "slower")))
        axes.set(xscale="log", xlabel="its time / the ILP's")
        _style.boxes(box, x=over, color=_style.tint(_style.ORDER_COLOURS["window"], 0.35), width=0.6)
        box.set_title(f"{table_policy.RIVALS[rival]}\nmedian {over.median():.3f}×; {said}", fontsize=9)
        box.grid(axis="y", visible=False)
        box.tick_params(axis="x", length=0, labelbottom=False)
        box.spines["bottom"].set_visible(False)
        box.set(xlabel="")
        for both in (box, axes):
            both.axvline(1, color=_style.DENSE, linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.grid(axis="y", visible=False)
        for line in range(1, len(models)):
            axes.axhline(line - 0.5, color="#E6E6E6", linewidth=0.7)
    boxes[0].set_yticks([0], ["all"])
    panels[0].set_yticks(range(len(models)), models)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    _style.head(drawn, "What integer programming gains, measured", _handles(orders))
    gains = frame["paper_gain"].dropna()
    theirs = (
        f" The paper's ILP saves {gains.min():.0%} to {gains.max():.0%} on its greedy (A100)." if len(gains) else ""
    )
    _style.notes(
        drawn,
        [
            "Right of 1 the ILP's schedule is faster, left of it slower. Boxes: quartiles of all "
            "cases, whiskers from 10 to 90 %. Lines: two standard errors. Hollow: a tie, within them. "
            f"The best fixed tile is the least of several measurements, noise included.{theirs}"
        ],
    )
    return drawn


def _handles(orders):
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], linestyle="none", marker="o", color=_style.order_colour(o, orders), label=_style.order_name(o))
        for o in orders
    ]
