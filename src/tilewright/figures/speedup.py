"""Best plan against dense SDPA for every workload, with the paper's best speed-up and the other peers beside it."""

from tilewright.figures import style
from tilewright.tables import read, speedup

_PEERS = {"sdpa_mask": ("v", "#882255"), "flex": ("^", "#44AA99")}


def needs(config):
    """What the table of the same name needs."""
    return speedup.needs(config)


def draw(inputs):
    """One panel per family, one bar per workload; peers and the paper are marks on the bar's axis."""
    frame = speedup.table(inputs)
    families = list(dict.fromkeys(frame["family"]))
    counts = [int((frame["family"] == family).sum()) for family in families]
    drawn = style.figure(max(6.5, 1.15 * sum(counts) + 1.2), 4.6)
    panels = drawn.subplots(1, len(families), squeeze=False, sharey=True, width_ratios=counts)[0]
    names = read.labels(frame)
    for axes, family in zip(panels, families, strict=True):
        rows = frame[frame["family"] == family].reset_index(drop=True)
        for row in rows.itertuples():
            _bar(axes, row)
            if row.paper_speedup > 0:
                place = (row.Index + 0.1, row.paper_speedup)
                style.outlined(
                    axes.text(*place, f"{row.paper_speedup:.1f}", va="center", color=style.PAPER, fontsize=8)
                )
        axes.plot(rows.index, rows["paper_speedup"], "D", color=style.PAPER, markersize=6, label="paper's best, A100")
        for peer, (marker, colour) in _PEERS.items():
            axes.plot(rows.index, rows[peer], marker, color=colour, markersize=6, label=style.PROVIDER_NAMES[peer])
        axes.axhline(1, color=style.DENSE, linewidth=1, label="dense SDPA, same run")
        axes.set_title(style.FAMILY_NAMES.get(family, family))
        axes.set_xticks(rows.index, [f"{names[row.model]}\n{_short(row)}" for row in rows.itertuples()], fontsize=8)
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("× dense, same device")
    panels[0].set_ylim(0, 1.12 * max(1, frame[["speedup", "paper_speedup", *_PEERS]].max(axis=None)))
    style.head(drawn, "Best plan over dense attention", panels[0].get_legend_handles_labels()[0])
    device = read.devices(frame)
    style.notes(
        drawn,
        [
            f"Bars: fastest checked plan over dense SDPA of the same run ({device}); colour and the second line of the "
            "tick name its order and solver. Diamonds: the paper's fastest plan over FlashAttention on an A100, whole "
            "networks.",
            *(f"{style.listed(rows['model'])}: {why}." for why, rows in frame.groupby("reason", sort=False) if why),
        ],
        width=int(15 * sum(counts) + 30),
    )
    return drawn


def _bar(axes, row):
    if not row.speedup > 0:
        axes.text(row.Index, 0.02, "not run", rotation=90, ha="center", va="bottom", color=style.PAPER, fontsize=8)
        return
    axes.bar(row.Index, row.speedup, 0.62, color=style.tint(style.order_colour(row.plan.split(" ")[0]), 0.75))
    axes.text(row.Index, row.speedup, f"{row.speedup:.1f}×", ha="center", va="bottom", fontsize=8.5)


def _short(row):
    order, _, rest = row.plan.partition(" + ")
    solver = rest.partition(" ")[0]
    return f"{style.order_name(order)} + {style.SOLVER_NAMES.get(solver, solver)}" if row.plan else ""
