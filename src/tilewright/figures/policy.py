"""What the ILP gains on the greedy policy for each workload and order, as predicted and as measured."""

from tilewright.figures import style
from tilewright.tables import policy, read


def needs(config):
    """What the table of the same name needs."""
    return policy.needs(config)


def draw(inputs):
    """Two panels, predicted and measured gain in percent: one line per workload, one dot per order."""
    frame = policy.table(inputs)
    models = list(read.labels(frame))
    orders = style.ordered(frame["reorder"])
    drawn = style.figure(9.2, 0.36 * len(models) + 2.3)
    panels = drawn.subplots(1, 2, sharex=True, sharey=True)
    for axes, column, title in zip(
        panels, ("predicted_gain", "measured_gain"), ("predicted", "measured (p50)"), strict=True
    ):
        for place, order in enumerate(orders):
            rows = frame[frame["reorder"] == order]
            y = [models.index(model) + (place - (len(orders) - 1) / 2) * 0.14 for model in rows["model"]]
            axes.plot(
                100 * rows[column],
                y,
                "o",
                markersize=5,
                color=style.order_colour(order, orders),
                label=style.order_name(order),
            )
        axes.axvline(0, color=style.DENSE, linewidth=1)
        axes.set_title(f"{title}: median {100 * frame[column].median():+.1f} %")
        axes.set_xlabel("1 − ILP / greedy (%)")
        axes.grid(axis="y", visible=False)
        for line in range(1, len(models)):
            axes.axhline(line - 0.5, color="#E6E6E6", linewidth=0.7)
    panels[0].set_yticks(range(len(models)), models)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    style.head(drawn, "Latency saved by the ILP schedule on greedy", panels[0].get_legend_handles_labels()[0])
    gains = frame["paper_gain"].dropna()
    theirs = (
        f" The paper's ILP saves {gains.min():.0%} to {gains.max():.0%} on its greedy policy (A100)."
        if len(gains)
        else ""
    )
    style.notes(
        drawn,
        [f"Right of 0 the ILP schedule is faster, left of it slower.{theirs}"],
        width=130,
    )
    return drawn
