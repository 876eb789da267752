"""What integer programming gains, measured: the time of each rival's schedule over that of the program's, every case a
mark.

The time of a rival's schedule over that of the integer program's, for each workload and order: right of 1 the program's
is faster. Hollow marks are ties, within two standard errors; the line is the median. The best of several fixed tiles is
the least of as many measurements, noise included, which favours it.
"""

import numpy as np

from tilewright_study.experiments.attention import table_policy
from tilewright_study.figures import _palette, _style

# How far marks of a row stand apart, at most.
_SPREAD = 0.32


def needs(config):
    """What the table of the same name needs."""
    return table_policy.needs(config)


def draw(inputs):
    """A row per rival, a mark per workload and order."""
    frame = table_policy.table(inputs)
    rivals = [rival for rival in table_policy.RIVALS if frame[f"over_{rival}"].notna().any()]
    if not rivals:
        return _style.nothing("What integer programming gains", [])
    drawn = _style.figure(1.3 + 0.62 * len(rivals))
    axes = drawn.subplots()
    medians = {}
    for place, rival in enumerate(rivals):
        rows = frame.dropna(subset=f"over_{rival}")
        over, ties = rows[f"over_{rival}"], rows[f"verdict_{rival}"] == "tie"
        # Marks of one row in a fixed sequence of heights, so that few hide others.
        heights = place + _SPREAD * (2 * ((np.arange(len(over)) * 0.618) % 1) - 1)
        for tie in (True, False):
            face = "white" if tie else _palette.BLUE
            mark = {"color": _palette.BLUE, "markerfacecolor": face, "markersize": 4, "markeredgewidth": 0.8}
            axes.plot(over[ties == tie], heights[ties == tie], "o", alpha=0.75, **mark)
        medians[rival] = over.median()
        axes.plot([medians[rival]] * 2, [place - 0.42, place + 0.42], color=_style.PAPER, linewidth=2)
        counts = rows[f"verdict_{rival}"].value_counts()
        said = "{} faster, {} ties, {} slower".format(*(counts.get(name, 0) for name in ("faster", "tie", "slower")))
        said = f"median {medians[rival]:.2f}×\n{said}"
        axes.text(1.01, place, said, transform=axes.get_yaxis_transform(), va="center")
    axes.axvline(1, color=_palette.DENSE, linewidth=1)
    axes.set_yticks(range(len(rivals)), [table_policy.RIVALS[rival] for rival in rivals])
    axes.set(ylim=(len(rivals) - 0.5, -0.5), xscale="log", xlabel="time over that of the integer program's schedule")
    _style.ratio_ticks(axes.xaxis)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    _style.head(drawn, _found(medians, frame))
    _style.notes(
        drawn, "A mark for each workload and order. Hollow: a tie, within two standard errors. Line: the median."
    )
    return drawn


def _found(medians, frame):
    """What the medians say, in words: as fast as one where most cases are ties."""
    words = {}
    for rival, median in medians.items():
        ties = (frame[f"verdict_{rival}"] == "tie").sum() > frame[f"over_{rival}"].notna().sum() / 2
        said = "as fast as" if ties else f"{_style.times([median])} times as fast as"
        words.setdefault(said, []).append(table_policy.RIVALS[rival])
    return "Integer programming: " + ", ".join(f"{said} {' and '.join(names)}" for said, names in words.items())
