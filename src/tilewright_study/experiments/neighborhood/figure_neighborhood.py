"""Neighbourhood attention over the tokens of a grid: how many times as long each contender takes as Tilewright."""

from tilewright_study.experiments.neighborhood import table_neighborhood
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

TITLES = {1: "1-D", 2: "2-D grids", 3: "3-D grids"}


def needs(config):
    """What the table of the same name needs."""
    return table_neighborhood.needs(config)


def draw(inputs):
    """A panel for grids of two and of three axes: a mark for each layer, lines through the middle of each size."""
    frame = table_neighborhood.table(inputs)
    others = frame[(frame["over_ours"] > 0) & (frame["provider"] != table_neighborhood.OURS)]
    shown = others[others["axes"] > 1]
    if shown.empty:
        return _style.nothing("Neighbourhood attention", frame["reason"])
    drawn, handles = _style.figure(3.6), {}
    panels = drawn.subplots(1, shown["axes"].nunique(), squeeze=False, sharey=True)[0]
    for axes, (number, found) in zip(panels, shown.groupby("axes"), strict=True):
        for provider in _palette.in_order(found["provider"], "neighborhoods"):
            own, look = found[found["provider"] == provider], _palette.look(provider, "neighborhoods")
            middle = own.groupby("tokens")["over_ours"].median()
            dotted = {"linestyle": ":"} if provider == table_neighborhood.DENSE else {}
            axes.plot(middle.index, middle, **look.line | {"marker": ""} | dotted)
            (handles[look.label],) = axes.plot(
                own["tokens"], own["over_ours"], label=look.label, **look.line | {"linestyle": ""}
            )
        axes.axhline(1, color=_palette.BLUE, linewidth=2)
        axes.set(xlabel="tokens", xscale="log", yscale="log")
        axes.set_title(TITLES[int(number)], loc="left")
        _style.plain_ticks(axes.xaxis, 4)
    panels[0].set_ylabel("time over Tilewright's (×)")
    _style.plain_ticks(panels[0].yaxis)
    panels[0].annotate(
        "Tilewright", (1, 1), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        color=_palette.BLUE, weight="bold",
    )  # fmt: skip
    _style.head(drawn, _finding(others), handles.values())
    beside = "Dense attention computes something else. " * (table_neighborhood.DENSE in set(shown["provider"]))
    _style.notes(drawn, f"{beside}{_read.devices(shown)}, {shown['dtype'].iloc[0]}, one image.")
    return drawn


def _finding(rows):
    """How many times as fast as the fastest that computes the same, over all layers."""
    same = rows[rows["provider"] != table_neighborhood.DENSE]
    fastest = same.groupby("case")["over_ours"].min()
    if fastest.empty:
        return "Neighbourhood attention"
    faster = (fastest > 1).sum()
    said = f"Neighbourhood attention: faster than every other in {faster} of {len(fastest)} layers"
    return f"{said}, {_style.times(fastest)} times as fast"
