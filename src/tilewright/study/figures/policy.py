"""What integer programming gains, measured, for each workload and order: against the best fixed tile, local search and
the plain greedy."""

from tilewright.study.figures import _style
from tilewright.study.tables import _read, policy


def needs(config):
    """What the table of the same name needs."""
    return policy.needs(config)


def draw(inputs):
    """A panel per rival: a row per workload, a dot per order with two standard errors, hollow where it is a tie."""
    from matplotlib.ticker import MaxNLocator

    frame = policy.table(inputs)
    models = list(_read.labels(frame))
    orders = _style.sorted_orders(frame["reorder"])
    rivals = [rival for rival in policy.RIVALS if frame[f"over_{rival}"].notna().any()]
    drawn = _style.figure(2.6 + 3.1 * max(1, len(rivals)), 0.36 * len(models) + 2.4)
    panels = drawn.subplots(1, max(1, len(rivals)), sharey=True, squeeze=False)[0]
    for axes, rival in zip(panels, rivals, strict=False):
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
        axes.set_title(f"{policy.RIVALS[rival]}\nmedian {over.median():.3f}×; {said}", fontsize=9)
        axes.axvline(1, color=_style.DENSE, linewidth=1)
        axes.set(xscale="log", xlabel="its time / the ILP's")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.grid(axis="y", visible=False)
        for line in range(1, len(models)):
            axes.axhline(line - 0.5, color="#E6E6E6", linewidth=0.7)
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
            "Right of 1 the ILP's schedule is faster, left of it slower; lines: two standard errors; hollow: a tie, "
            f"within them. The best fixed tile is the least of several measurements, noise included.{theirs}"
        ],
        width=130,
    )
    return drawn


def _handles(orders):
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], linestyle="none", marker="o", color=_style.order_colour(o, orders), label=_style.order_name(o))
        for o in orders
    ]
