"""Whole networks from images to logits: p50 of every attention, attention and rest apart, batch by batch."""

from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.figures import _networks, _style
from tilewright_study.tables import _read

_OURS, _OTHERS = "#0072B2", _style.DENSE
# More networks than these do not stand side by side.
_ABREAST = 5


def needs(config):
    """What the table of the same name needs."""
    return table_end_to_end.needs(config)


def draw(inputs):
    """A column of panels per network, a row per batch, or the reverse where there are many networks; a bar per
    attention, from the top as the peers are listed."""
    frame = table_end_to_end.table(inputs)
    networks, batches = list(dict.fromkeys(frame["network"])), sorted(set(frame["batch"]))
    found = dict.fromkeys(frame["attention"])
    peers = [
        name
        for name in dict.fromkeys((*table_end_to_end.PEERS, *found))
        if name in found and name != table_end_to_end.OURS
    ]
    shown = [*peers, *(name for name in found if name == table_end_to_end.OURS)]
    many = len(networks) > _ABREAST
    rows, columns = (len(networks), len(batches)) if many else (len(batches), len(networks))
    drawn = _style.figure(max(7.6, 3.5 * columns), 1.3 + rows * (0.75 + 0.36 * len(shown)))
    panels = drawn.subplots(rows, columns, squeeze=False)
    for row, batch in zip(panels.T if many else panels, batches, strict=True):
        for axes, network in zip(row, networks, strict=True):
            here = frame[(frame["network"] == network) & (frame["batch"] == batch)].set_index("attention")
            _bars(axes, here, shown)
            axes.set_title(f"{_title(network)}, batch {batch:.0f}")
    for axes in panels[-1]:
        axes.set_xlabel("latency of the batch, p50 (ms)")
    for axes in panels[:, 1:].flat:
        axes.tick_params(axis="y", labelleft=False)
    _style.head(drawn, "Whole networks, from images to logits", _handles())
    blank = frame[frame["status"] != "ok"]
    names = [f"{network}, batch {batch:.0f}" for network, batch in zip(blank["network"], blank["batch"], strict=True)]
    blank = blank.assign(name=names)
    checked = frame["relative_error"].max()
    ties = frame[frame["verdict"] == "tie"]
    tied = [f"{row.network} batch {row.batch:.0f} ({_name(row.peer)})" for row in ties.itertuples()]
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}; the same random weights for every attention; photographs. Before a time was "
            f"taken, logits were compared with those of masked SDPA: largest relative error {checked:.1g}. At each bar "
            "its latency and how many times faster it is than as published. Scales differ; whiskers: p20, p80. "
            f"Ties of ours with the fastest peer, within two standard errors: {', '.join(tied) or 'none'}.",
            *(
                f"× {_name(attention)} ({_style.listed(rows['name'])}): {status}, {reason}."
                for (attention, status, reason), rows in blank.groupby(["attention", "status", "reason"], sort=False)
            ),
        ],
    )
    return drawn


def _name(attention):
    """What an attention is called in figures."""
    return _networks.ATTENTIONS.get(attention, attention)


def _title(network):
    """Family in words, then what follows it in the name."""
    family, _, rest = network.partition("-")
    return f"{_style.FAMILY_NAMES.get(family, family)} {rest}"


def _bars(axes, rows, shown):
    from matplotlib.ticker import MaxNLocator

    widest = rows["p80_us"].max() / 1e3
    for place, name in enumerate(shown):
        if name not in rows.index:
            axes.text(0, place, " not selected", va="center", fontsize=8, color="#888888")
            continue
        row = rows.loc[name]
        if row["status"] != "ok":
            axes.text(0, place, " ×", va="center", color=_style.PAPER, fontsize=11)
            continue
        colour = _OURS if name == "tilewright" else _OTHERS
        attention, p50 = row["attention_us"] / 1e3, row["p50_us"] / 1e3
        axes.barh(place, attention, 0.62, color=colour)
        axes.barh(place, p50 - attention, 0.62, left=attention, color=_style.tint(colour, 0.35))
        spread = [[max(0, p50 - row["p20_us"] / 1e3)], [max(0, row["p80_us"] / 1e3 - p50)]]
        axes.errorbar(p50, place, xerr=spread, color=_style.INK, linewidth=0.8, capsize=1.5)
        ratio = "" if name == "native" or not row["over_native"] > 0 else f"  ({_style.ratio(row['over_native'])})"
        weight = "bold" if name == "tilewright" else "normal"
        at = row["p80_us"] / 1e3 + 0.02 * widest
        axes.text(at, place, f"{p50:,.{0 if p50 >= 100 else 1}f}{ratio}", va="center", fontsize=8, weight=weight)
    axes.set_yticks(range(len(shown)), [_name(name) for name in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    # Room for the numbers at the bars.
    axes.set_xlim(0, 1.42 * widest if widest > 0 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _handles():
    from matplotlib.patches import Patch

    return [
        Patch(color=_OURS, label="Tilewright: attention"),
        Patch(color=_style.tint(_OURS, 0.35), label="rest of the network"),
        Patch(color=_OTHERS, label="peers: attention"),
        Patch(color=_style.tint(_OTHERS, 0.35), label="rest of the network"),
    ]
