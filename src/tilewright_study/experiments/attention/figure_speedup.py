"""The headline plan of every workload over the fastest other attention of the same run, dense or sparse.

How many times as fast as the fastest other attention of the same run the headline plan is, for each workload: window
order, mixed tiles, HiGHS, chosen before measuring. Lines are two standard errors; hollow marks are ties, within them.
Beside each stand its time and that of the other one.
"""

from tilewright_study.experiments.attention import table_speedup
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of the same name needs."""
    return table_speedup.needs(config)


def draw(inputs):
    """A row per workload, the one that gains most on top."""
    frame = table_speedup.table(inputs)
    found = frame[frame["over_peer"] > 0].sort_values("over_peer", ascending=False)
    if found.empty:
        return _style.nothing("The headline plan over the fastest other attention", frame["reason"])
    verdict = _read.verdict(found["over_peer"], found["noise_peer"])
    drawn = _style.figure(1.3 + 0.25 * len(found))
    axes = drawn.subplots()
    for place, (row, judged) in enumerate(zip(found.itertuples(), verdict, strict=True)):
        colour = _style.PAPER if judged == "slower" else _palette.BLUE
        noise = row.noise_peer if row.noise_peer > 0 else 0
        axes.errorbar(row.over_peer, place, xerr=min(noise, 0.9 * row.over_peer), color=colour, linewidth=1)
        face = "white" if judged == "tie" else colour
        axes.plot(row.over_peer, place, "o", markersize=6, color=colour, markerfacecolor=face)
        peer = _palette.look(row.peer.partition(" ")[0], "sparse").label
        said = f"{_style.ratio(row.over_peer)}: {_style.duration(row.plan_us)}, {peer} {_style.duration(row.peer_us)}"
        axes.annotate(said, (row.over_peer + noise, place), (6, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=_palette.DENSE, linewidth=1)
    names = [_style.workload(row.model, row.tokens) for row in found.itertuples()]
    axes.set_yticks(range(len(found)), names)
    axes.set(ylim=(len(found) - 0.5, -0.5), xscale="log", xlabel="× the fastest other attention")
    low, high = min(1, found["over_peer"].min()), max(1, found["over_peer"].max())
    # Room for the words beside the marks.
    axes.set_xlim(low / 1.2, high * (high / low) ** 1.1 * 1.6)
    _style.plain_ticks(axes.xaxis)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    faster, ties = ((verdict == name).sum() for name in ("faster", "tie"))
    finding = f"Faster than every other attention in {faster} of {len(found)} workloads"
    finding += f", as fast in {ties}" if ties else ""
    _style.head(drawn, f"{finding}: {_style.times(found['over_peer'])} times as fast")
    _style.notes(drawn, f"One layer, {_read.devices(frame)}. Lines: two standard errors. Hollow: a tie.")
    return drawn
