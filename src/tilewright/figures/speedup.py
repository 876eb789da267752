"""Best plan against dense SDPA for every workload, with the paper's best speed-up and the other peers beside it."""

from tilewright.figures import style
from tilewright.tables import read, speedup

_MARKS = {
    "paper_speedup": ("D", style.PAPER, "paper's best, A100"),
    "sdpa_mask": ("v", "#882255", style.PROVIDER_NAMES["sdpa_mask"]),
    "flex": ("^", "#44AA99", style.PROVIDER_NAMES["flex"]),
    "peer_speedup": ("_", style.INK, "fastest peer"),
}
# Where the marks stand beside a bar.
_MARKS_AT = 0.17


def needs(config):
    """What the table of the same name needs."""
    return speedup.needs(config)


def draw(inputs):
    """One panel per family; each workload's bar goes up or down from 1, with peers and the paper as marks beside it."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator

    frame = speedup.table(inputs)
    frame["peer_speedup"] = frame["speedup"] / frame["over_peer"]
    families = list(dict.fromkeys(frame["family"]))
    counts = [int((frame["family"] == family).sum()) for family in families]
    drawn = style.figure(max(7.6, 1.15 * sum(counts) + 1.2), 4.9)
    panels = drawn.subplots(1, len(families), squeeze=False, sharey=True, width_ratios=counts)[0]
    names = read.labels(frame)
    for axes, family in zip(panels, families, strict=True):
        rows = frame[frame["family"] == family].reset_index(drop=True)
        for row in rows.itertuples():
            _bar(axes, row)
        for column, (marker, colour, _) in _MARKS.items():
            edge = colour if marker == "_" else "white"
            axes.plot(rows.index + _MARKS_AT, rows[column], marker, color=colour, markersize=6, markeredgecolor=edge)
        axes.axhline(1, color=style.DENSE, linewidth=1)
        axes.set_title(style.FAMILY_NAMES.get(family, family))
        ticks = [f"{_plan(row)}\n{style.folded(names[row.model])}" for row in rows.itertuples()]
        axes.set_xticks(rows.index, ticks, fontsize=8)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("speed-up over dense, same device")
    values = frame[["speedup", *_MARKS]].where(lambda value: value > 0)
    panels[0].set_yscale("log")
    panels[0].set_ylim(0.8 * min(1, values.min(axis=None)), 1.25 * max(1, values.max(axis=None)))
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_minor_locator(NullLocator())
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, label=label)
        for column, (marker, colour, label) in _MARKS.items()
        if frame[column].notna().any()
    ]
    handles.append(Line2D([], [], color=style.DENSE, linewidth=1, label="dense SDPA, same run"))
    style.head(drawn, "Best plan over dense attention", handles)
    style.notes(
        drawn,
        [
            f"Bars: fastest checked plan over dense SDPA of the same run ({read.devices(frame)}); below each its "
            "number, order and solver. Diamonds: the paper's fastest over FlashAttention on an A100, whole networks.",
            *(f"{style.listed(rows['model'])}: {why}." for why, rows in frame.groupby("reason", sort=False) if why),
        ],
        width=max(110, int(15 * sum(counts) + 30)),
    )
    return drawn


def _bar(axes, row):
    if row.paper_speedup > 0:
        text = axes.text(
            row.Index + _MARKS_AT + 0.1, row.paper_speedup, style.ratio(row.paper_speedup), va="center", fontsize=8
        )
        text.set_color(style.PAPER)
        style.outlined(text)
    if row.speedup > 0:
        colour = style.tint(style.order_colour(row.plan.split(" ")[0]), 0.75)
        axes.bar(row.Index - 0.14, row.speedup - 1, 0.42, bottom=1, color=colour)


def _plan(row):
    """Number, order and solver of the best plan, below its bar."""
    if not row.speedup > 0:
        return "not run"
    order, solver, *_ = row.plan.replace(" + ", " ").split(" ")
    return f"{style.ratio(row.speedup)}\n{style.order_name(order)} + {style.SOLVER_NAMES.get(solver, solver)}"
