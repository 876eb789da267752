"""Whole networks by the order and the solver of their plans: how many times faster than with the plans that they make
by themselves."""

from tilewright.networks import Plans
from tilewright_study.experiments.networks import table_end_to_end, table_network_plans
from tilewright_study.figures import _networks, _style
from tilewright_study.tables import _read

# Names, marks, and how much of the order's colour fills them.
_POLICIES = {
    "fixed": ("one tile", "s", 0),
    "greedy": ("greedy", "o", 0),
    "descent": ("local search", "v", 0),
    "published": ("ILP, published objective", "D", 0.5),
    "ilp": ("ILP", "o", 1),
}


def needs(config):
    """What the table of the same name needs."""
    return table_network_plans.needs(config)


def draw(inputs):
    """A column of panels per network, a row per batch; a mark per order and solver, the peers in words."""
    frame = table_network_plans.table(inputs)
    frame["policy"] = frame["solver"].map(_read.policy).where(~frame["tiles"].str.fullmatch(r"\d+x\d+"), "fixed")
    orders = _style.sorted_orders(frame["reorder"])
    blank = frame[frame["status"] != "ok"]
    frame = frame[~frame["network"].isin(_without_others(frame))]
    networks, batches = list(dict.fromkeys(frame["network"])), sorted(set(frame["batch"]))
    drawn = _style.figure(max(7.6, 2.6 * len(networks)), 1.9 + 1.9 * max(1, len(batches)))
    if frame.empty:
        _style.nothing(drawn.subplots(), "No network has other plans than its own.")
    else:
        panels = drawn.subplots(len(batches), len(networks), squeeze=False, sharex=True)
        for row, batch in zip(panels, batches, strict=True):
            for axes, network in zip(row, networks, strict=True):
                rows = frame[(frame["network"] == network) & (frame["batch"] == batch)]
                axes.set_visible(not rows.empty)
                _marks(axes, rows, orders)
                axes.set_title(f"{network}, batch {batch:.0f}", fontsize=9)
            row[0].set_ylabel("× its own plans")
        for column in panels.T:
            [*_, lowest] = [axes for axes in column if axes.get_visible()]
            lowest.tick_params(labelbottom=True)
    _style.head(drawn, "Whole networks by order and solver", _handles(frame))
    own = Plans()
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}; times as a CUDA graph where there is one, else p50. Above 1 a network is faster "
            f"than with its own plans: order {own.reorder}, solver {own.solver}, all tiles. In words: with another "
            "attention. Scales differ.",
            *(
                f"× {_style.listed(sorted(set(rows['network'])))}: {reason}."
                for reason, rows in blank.groupby("reason", sort=False)
            ),
        ],
    )
    return drawn


def _without_others(frame):
    """Networks of which no plans but their own were timed."""
    own = Plans()
    others = frame[(frame["reorder"] != own.reorder) | (frame["solver"] != own.solver) | (frame["tiles"] != "")]
    return set(frame["network"]) - set(others.loc[others["over_own"] > 0, "network"])


def _marks(axes, rows, orders):
    policies = [name for name in _POLICIES if name in set(rows["policy"])]
    for row in rows[rows["over_own"] > 0].itertuples():
        x = orders.index(row.reorder) + (policies.index(row.policy) - (len(policies) - 1) / 2) * 0.2
        _, marker, strength = _POLICIES[row.policy]
        colour = _style.order_colour(row.reorder, orders)
        face = _style.tint(colour, strength) if strength else "white"
        axes.plot(x, row.over_own, marker, color=colour, markerfacecolor=face, markersize=5)
    axes.axhline(1, color=_style.INK, linewidth=0.8)
    # Of the network's own plans.
    over = {name: (rows["over_own"] / rows[f"over_{name}"]).median() for name in table_end_to_end.PEERS}
    peers = [f"{_networks.ATTENTIONS[name]} {value:.2f}" for name, value in over.items() if value > 0]
    axes.set_title("\n".join(peers), loc="right", y=0.02, fontsize=6.5, color=_style.DENSE)
    axes.set_xticks(range(len(orders)), [_style.order_name(order) for order in orders], fontsize=8)
    axes.set_xlim(-0.6, len(orders) - 0.4)
    lowest, highest = axes.get_ylim()
    # Room for the words.
    axes.set_ylim(lowest - 0.45 * (highest - lowest), highest)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _handles(frame):
    from matplotlib.lines import Line2D

    marks = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=marker,
            color=_style.INK,
            markerfacecolor=_style.tint(_style.INK, strength) if strength else "white",
            label=label,
        )
        for name, (label, marker, strength) in _POLICIES.items()
        if name in set(frame["policy"])
    ]
    return [*marks, Line2D([], [], color=_style.INK, linewidth=0.8, label="its own plans")]
