"""How the contenders of packed attention and of pruned networks look: one colour each, ours the blue of all figures."""

import math

# Panels side by side.
ACROSS = 4
OURS = "#0072B2"
# By provider and by strategy, the same idea in the same colour.
COLOURS = {
    "tilewright": OURS,
    "ragged": OURS,
    "padded": "#5A5A5A",
    "padded_unfused": "#AAAAAA",
    "sdpa_mask": "#5A5A5A",
    "padded_kept": "#E69F00",
    "sdpa_flash": "#E69F00",
    "gathered": "#009E73",
    "torch_varlen": "#009E73",
    "varlen": "#D55E00",
    "flash_varlen": "#D55E00",
    "flash3_varlen": "#882255",
    "nested": "#CC79A7",
    "flex": "#56B4E9",
}
NAMES = {
    "tilewright": "Tilewright",
    "ragged": "Tilewright, packed",
    "padded": "padded to the full length",
    "padded_unfused": "the same, attention unfused (as published)",
    "padded_kept": "padded to the longest kept",
    "gathered": "gathered, dense",
    "varlen": "packed, FlashAttention varlen",
    "sdpa_mask": "padded, masked SDPA",
    "sdpa_flash": "padded, flash without mask (a bound)",
    "flash_varlen": "FlashAttention varlen",
    "flash3_varlen": "FlashAttention-3 varlen",
    "torch_varlen": "torch varlen",
    "nested": "NestedTensor",
    "flex": "FlexAttention",
}


def ordered(names):
    """`names` of contenders, once each, ours first."""
    return [name for name in COLOURS if name in set(names)]


def look(name):
    """Colour, label and weight of a contender's line."""
    ours = COLOURS[name] == OURS
    return {
        "color": COLOURS[name],
        "label": NAMES[name],
        "marker": "o",
        "markersize": 4,
        "linewidth": 2 if ours else 1.2,
        "zorder": 3 if ours else 2,
    }


def grid(count, height, xlabel, **shared):
    """``(figure, panels, width of notes)``: `count` panels of speed-ups over padding, `ACROSS` side by side.

    height: of a row, in inches. shared: as of ``Figure.subplots``.
    """
    from tilewright.study.figures import _style

    across = min(ACROSS, count)
    down = math.ceil(count / across)
    drawn = _style.figure(max(9.6, 3.1 * across), 1.7 + height * down)
    rows = drawn.subplots(down, across, squeeze=False, **shared)
    panels = rows.flat[:count]
    for axes in rows.flat[count:]:
        axes.set_axis_off()
    # The last ones stand lowest, each in its column.
    for axes in panels[-across:]:
        axes.set_xlabel(xlabel)
    for axes in rows[:, 0]:
        axes.set_ylabel("× padded to the full length")
    return drawn, panels, max(130, 48 * across)


def told(axes, values, axis="x"):
    """A logarithmic axis with a tick at each of `values`."""
    values = sorted(set(values))
    axes.set(**{f"{axis}scale": "log"})
    getattr(axes, f"set_{axis}ticks")(values, [f"{value:,.0f}" for value in values])
    axes.minorticks_off()


def blanks(frame, name, where):
    """Notes on the rows of `frame` that were not measured: who, where and why. where: columns that tell where."""
    from tilewright.study.figures import _style

    blank = frame[frame["status"] != "ok"]
    # What was found differs from case to case.
    blank = blank.assign(reason=blank["reason"].astype(str).str.replace(", found from .*", "", regex=True))
    places = blank[where].astype(str).agg(" ".join, axis=1) if len(blank) else blank[name]
    return [
        f"Blank: {NAMES[who]} ({_style.listed(places[rows.index], 3, 'cases')}): {status}, {reason}."
        for (who, status, reason), rows in blank.groupby([name, "status", "reason"], sort=False)
    ]
