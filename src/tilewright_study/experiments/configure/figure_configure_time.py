"""Seconds until a memory tile is configured: by algebra, by model checking, and by the published configurator.

Seconds until a whole memory tile is configured, a mark for each stream: by algebra on what its controllers did, and by
model checking of its RTL. Crosses are the published configurator's times for the identity of 16 × 16 words, on a
machine that is not known; its whole tile was one question about its ports alone.
"""

from tilewright_study.experiments.configure import table_configure
from tilewright_study.figures import _palette, _style

WAYS = {"fit": "algebra", "bmc": "model checking"}
# What stands for no time at all on a logarithmic axis.
LEAST_S = 1e-3


def needs(config):
    """What the table needs."""
    return table_configure.needs(config)


def draw(inputs):
    """A row for each way, a mark for each stream."""
    frame, paper = table_configure.components(inputs), table_configure.published(inputs)
    whole = frame[(frame["status"] == "ok") & (frame["component"] == "")]
    if whole.empty:
        return _style.nothing("Seconds until a memory tile is configured", frame["reason"])
    ways = [way for way in WAYS if way in set(whole["solved_by"])]
    drawn = _style.figure(1.5 + 0.45 * (len(ways) + 1))
    axes = drawn.subplots()
    found = {}
    for place, way in enumerate(ways):
        found[way] = whole.loc[whole["solved_by"] == way, "seconds"].clip(lower=LEAST_S)
        axes.plot(found[way], [place] * len(found[way]), "o", color=_palette.BLUE, markersize=7, alpha=0.6)
    place = len(ways)
    axes.plot(paper["paper_seconds"], [place] * len(paper), "x", color=_style.INK, markersize=8, markeredgewidth=2)
    axes.set_yticks(range(place + 1), [*(WAYS[way] for way in ways), "published configurator"])
    axes.set(xscale="log", xlabel="seconds", ylim=(place + 0.5, -0.5))
    _style.plain_ticks(axes.xaxis)
    axes.grid(axis="y", visible=False)
    said = [f"{WAYS[way]} {_seconds(values)}" for way, values in found.items()]
    said += [f"the published configurator {_seconds(paper['paper_seconds'])}"] if len(paper) else []
    finding = ", ".join(said)
    _style.head(drawn, f"To configure a memory tile takes {finding}")
    lengths = f"{whole['cycles'].min():,.0f} to {whole['cycles'].max():,.0f} cycles"
    _style.notes(
        drawn,
        f"{', '.join(sorted(set(frame['device'])))}, one core; streams of {lengths}. Published: the identity of "
        "16 × 16 words, machine not known, for its parts and for its ports alone.",
    )
    return drawn


def _seconds(values):
    return f"up to {values.max():,.0f} s" if values.max() >= 9.95 else f"up to {values.max():.2g} s"
