"""Whole networks from images to logits: p50 of every attention, attention and rest apart.

Whole networks on photographs, from images to logits, the smallest and the largest image of each family: p50 of each
attention, the dark part of a bar is attention without its projections. All have the same random weights; before a time
was taken, logits were compared with those of masked SDPA. A bar that would hide the others ends at the panel's edge.
"""

from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read, _select

# A bar is drawn to this many times the longest of ours and the network as published.
_LONGEST = 1.6
_COLUMNS = 3


def needs(config):
    """What the table of the same name needs."""
    return table_end_to_end.needs(config)


def draw(inputs):
    """A panel for the smallest and for the largest image of each family, at the batch at which most were run."""
    frame = table_end_to_end.table(inputs)
    ran = frame[frame["p50_us"] > 0]
    ours = ran[ran["attention"] == table_end_to_end.OURS]
    finding = "Whole networks, from images to logits"
    if ran.empty:
        return _style.nothing(finding, frame["reason"])
    cases = _cases(ran)
    columns = min(_COLUMNS, len(cases))
    rows = -(-len(cases) // columns)
    names = _palette.in_order(ran["attention"], "attention")
    drawn = _style.figure(1.2 + rows * (0.75 + 0.27 * len(names)))
    panels = drawn.subplots(rows, columns, squeeze=False, sharey=True)
    # Small images above, large ones below.
    places = list(panels.T.flat if rows > 1 and len(cases) == rows * columns else panels.flat)
    for axes, (network, batch) in zip(places, cases, strict=False):
        here = ran[(ran["network"] == network) & (ran["batch"] == batch)].set_index("attention")
        _bars(axes, here, names)
        axes.set_title(f"{_style.network(network)}", loc="left")
    for axes in places[len(cases) :]:
        axes.set_visible(False)
    for axes in places[: len(cases)] if rows == 1 else panels[-1]:
        axes.set_xlabel("p50 of a batch (ms)")
    judged = ours[ours["verdict"] != ""]
    if len(judged):
        counts = judged["verdict"].value_counts()
        finding = (
            f"Whole networks: faster than every other attention in {counts.get('faster', 0)} of {len(judged)} cases"
        )
        finding += f", as fast in {counts['tie']}" if "tie" in counts else ""
    _style.head(drawn, finding)
    batches = " or ".join(f"{batch:.0f}" for batch in sorted({batch for _, batch in cases}))
    _style.notes(
        drawn,
        f"{_read.devices(frame)}, batch {batches}, called from Python. Dark: attention. Pale: the rest of the network.",
    )
    return drawn


def _cases(rows):
    """``(network, batch)`` of each panel: of each family the first and the last network, as they come."""
    found = rows.drop_duplicates("network")
    ends = found.groupby(found["network"].map(_select.family), sort=False)["network"].agg(["first", "last"])
    networks = list(dict.fromkeys(name for pair in ends.to_numpy() for name in pair))
    counts = rows[rows["network"].isin(networks)].groupby("batch").size()
    batch = counts[counts == counts.max()].index[-1]
    own = {name: set(rows.loc[rows["network"] == name, "batch"]) for name in networks}
    return [(name, batch if batch in own[name] else min(own[name])) for name in networks]


def _bars(axes, rows, names):
    kept = rows.loc[[name for name in ("native", table_end_to_end.OURS) if name in rows.index] or rows.index, "p50_us"]
    end = _LONGEST * kept.max() / 1e3
    for place, name in enumerate(names):
        if name not in rows.index:
            continue
        row, look = rows.loc[name], _palette.look(name, "attention")
        p50, attention = row["p50_us"] / 1e3, row["attention_us"] / 1e3
        axes.barh(place, min(attention, end), 0.66, color=look.colour)
        axes.barh(place, max(0, min(p50, end) - attention), 0.66, left=attention, color=_style.tint(look.colour, 0.35))
        weight = "bold" if name == table_end_to_end.OURS else "normal"
        text = f"{p50:,.{0 if p50 >= 100 else 1}f}" + " →" * bool(p50 > end)
        axes.annotate(
            text, (min(p50, end), place), (-3 if p50 > end else 3, 0), textcoords="offset points", va="center",
            ha="right" if p50 > end else "left", weight=weight, color="white" if attention > end else _style.INK,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), [_palette.look(name, "attention").label for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.12 * end))
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
