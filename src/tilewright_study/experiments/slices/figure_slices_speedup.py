"""Attention by slice lists: speed-up over the fastest dense attention by the keys left out and the attention kept.

Attention by slice lists over the share of keys that they leave out: speed-up over the fastest dense attention of the
same run. Dotted: time in proportion to the keys kept. Dashed: the keys are chosen in each call. Queries and keys are
planted.
"""

import numpy as np

from tilewright_study.experiments.slices import ORACLE, SLICE, table_slices
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table needs."""
    return table_slices.needs(config)


def draw(inputs):
    """Two panels per case: over the share of keys that lists leave out, and over the share of attention that they
    keep."""
    from matplotlib.lines import Line2D

    frame = table_slices.table(inputs)
    cases = list(frame.groupby("case", sort=False))
    drawn = _style.figure(9.6, 1.9 + 3.1 * len(cases))
    styles = {}
    for (left, right), (case, rows) in zip(
        drawn.subplots(len(cases), 2, squeeze=False, sharey="row"), cases, strict=True
    ):
        sparsities = np.linspace(100 * rows["sparsity"].min(), 100 * rows["sparsity"].max())
        left.plot(sparsities, 100 / (100 - sparsities), ":", color=_style.INK)
        for name, own, look in _lines(rows):
            styles.setdefault(name, look)
            own = own.dropna(subset="speedup").sort_values("sparsity")
            left.plot(100 * (1 - own["density"]), own["speedup"], markersize=4, **styles[name])
            right.plot(100 * own["recall"], own["speedup"], markersize=4, **styles[name])
        left.set(xlabel="keys left out (%)", ylabel="× fastest dense attention", yscale="log")
        right.set(xlabel="attention kept, mean over queries (%)")
        for axes in (left, right):
            axes.axhline(1, color=_style.INK, linewidth=0.8)
            axes.set_title(f"{case}, {rows['tokens'].iloc[0]:,.0f} tokens")
            _style.plain_ticks(axes.yaxis)
    handles = [Line2D([], [], label=name, markersize=4, **style) for name, style in styles.items()]
    handles.append(Line2D([], [], linestyle=":", color=_style.INK, label="time in proportion to the keys kept"))
    _style.head(drawn, "Attention by slice lists", handles, columns=3)
    maps = ", ".join(sorted(set(frame["maps"])))
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}, {', '.join(sorted(set(frame['dtype'])))}; {maps} maps, tokens in the order "
            f"{', '.join(sorted(set(frame['token_order'])))}. Lists are chosen by the exact shares of attention, "
            "dashed by a predictor in each call. Every result was compared with attention in float64 over the same "
            "lists first. Lists that leave out as many keys do not keep as much attention: right.",
            *_contenders.blanks(frame, "provider", ["case"]),
        ],
    )
    return drawn


def _lines(rows):
    """``(name, rows, look)`` of each line of a panel, ours first."""
    attend = rows[rows["call"] == "attend"]
    for group in dict.fromkeys(attend.loc[attend["chosen_by"] == ORACLE, "group"]):
        own = table_slices.attending(rows, group)
        look = {"color": _contenders.GROUPS.get(group) or _contenders.further(group), "marker": "o"}
        name = f"Tilewright {group.replace('x', '×')}"
        yield name, own[own["lengths"] == "equal"], look | {"linewidth": 2 if group == SLICE else 1.2}
        if (own["lengths"] == "uneven").any():
            look |= {"marker": "D", "markerfacecolor": "none", "linewidth": 1, "linestyle": "-."}
            yield f"{name}, uneven lists", own[own["lengths"] == "uneven"], look
    for name in dict.fromkeys(rows.loc[rows["call"] == "predict_attend", "chosen_by"]):
        colour, marker = _contenders.chooser(name)
        own = rows[(rows["call"] == "predict_attend") & (rows["chosen_by"] == name)]
        yield (
            f"with {name} in each call",
            own,
            {"color": colour, "linestyle": "--", "marker": marker, "linewidth": 1.4},
        )
    blocked = attend[attend["provider"].isin(_contenders.BLOCKED) & attend["speedup"].notna()]
    for (provider, group), own in blocked.groupby(["provider", "group"], sort=False):
        colour, marker = _contenders.BLOCKED[provider]
        look = {"color": colour, "marker": marker, "linewidth": 1.2}
        # Of one provider the shapes of blocks differ by what fills their marks.
        look |= {"markerfacecolor": "none"} if group == "128x64" else {}
        yield f"{_style.PROVIDER_NAMES[provider]} {group.replace('x', '×')}", own, look
