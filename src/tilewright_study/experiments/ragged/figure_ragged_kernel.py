"""Attention of packed images over their number: how many times as long each contender takes as Tilewright.

Attention of packed images over their number: the time of each contender over that of Tilewright. What a network
prepares once a batch, such as masks, is not in the time. Flash attention of the padded images without a mask does not
compute the same: it is a bound.
"""

from tilewright_study.experiments.ragged import table_ragged
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Shapes of heads and lengths that stand side by side, those that most contenders ran.
_MOST = 2
_BOUND = "sdpa_flash"


def needs(config):
    """What the table of packed attention needs."""
    return table_ragged.needs(config)


def draw(inputs):
    """A panel per shape of heads and lengths."""
    frame = table_ragged.table(inputs)
    found = frame[(frame["call"] == "attend") & (frame["over_ours"] > 0)]
    others = found[found["provider"] != table_ragged.OURS]
    if others.empty:
        return _style.nothing("Attention of packed images", frame["reason"])
    cases = sorted(others.groupby(["heads", "head_dim", "lengths"], sort=False), key=lambda case: -len(case[1]))[:_MOST]
    drawn = _style.figure(3.9)
    handles = {}
    for axes, ((heads, head_dim, lengths), rows) in zip(
        drawn.subplots(1, len(cases), squeeze=False, sharey=True)[0], cases, strict=True
    ):
        for provider in _palette.in_order(rows["provider"], "packed"):
            own, look = rows[rows["provider"] == provider].sort_values("images"), _palette.look(provider, "packed")
            style = look.line | ({"linestyle": ":"} if provider == _BOUND else {})
            (handles[look.label],) = axes.plot(own["images"], own["over_ours"], label=look.label, **style)
        axes.axhline(1, color=_palette.BLUE, linewidth=2)
        axes.set(xlabel="images", yscale="log")
        axes.set_title(f"{heads:.0f} heads × {head_dim:.0f}, {lengths} tokens an image", loc="left")
        _style.log_ticks(axes.xaxis, rows["images"])
    first = drawn.axes[0]
    first.set_ylabel("time over Tilewright's (×)")
    _style.plain_ticks(first.yaxis)
    first.annotate(
        "Tilewright", (1, 1), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        color=_palette.BLUE, weight="bold",
    )  # fmt: skip
    _style.head(
        drawn,
        _finding(others),
        [
            handles[_palette.look(name, "packed").label]
            for name in _palette.in_order(others["provider"], "packed")
            if _palette.look(name, "packed").label in handles
        ],
    )
    _style.notes(drawn, f"{_read.devices(found)}, {found['dtype'].iloc[0]}; what is prepared once a batch is left out.")
    return drawn


def _finding(rows):
    """How many times as fast as the fastest that computes the same, over all cases."""
    same = rows[rows["provider"] != _BOUND]
    fastest = same.groupby(["heads", "head_dim", "lengths", "images"])["over_ours"].min()
    if fastest.empty:
        return "Attention of packed images"
    faster = (fastest > 1).sum()
    said = f"Packed images: faster than every other attention in {faster} of {len(fastest)} cases"
    return f"{said}, {_style.times(fastest)} times as fast"
