"""Attention by slice lists: speed-up over the fastest dense attention by the keys left out and the attention kept.

Attention by lists over the share of keys that they leave out (left) and the share of attention that they keep (right):
speed-up over the fastest dense attention of the same run, at the size that most others ran. Lists are chosen by the
exact shares of attention; "choosing included" is slices with a predictor in each call. Dotted: time in proportion to
the keys kept. Queries and keys are planted.
"""

import numpy as np

from tilewright_study.experiments.slices import ORACLE, SLICE, table_slices
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Blocks of keys, of ours and of others: of several shapes the one that is fastest at the most keys left out.
_BLOCKS = "128x64"


def needs(config):
    """What the table needs."""
    return table_slices.needs(config)


def draw(inputs):
    """Two panels: over the share of keys that lists leave out, and over the share of attention that they keep."""
    frame = table_slices.table(inputs)
    timed = frame.dropna(subset="speedup")
    if timed[timed["chosen_by"] != ""].empty:
        return _style.nothing("Attention by slice lists over dense attention", frame["reason"])
    counts = timed.groupby(["case", "tokens"], sort=False)["provider"].agg(["nunique", "size"]).reset_index()
    case = counts.sort_values(["nunique", "size", "tokens"], kind="stable")["case"].iloc[-1]
    rows = timed[timed["case"] == case]
    drawn = _style.figure(3.9)
    left, right = drawn.subplots(1, 2, sharey=True)
    sparsities = np.linspace(100 * rows["sparsity"].min(), 100 * rows["sparsity"].max())
    left.plot(sparsities, 100 / (100 - sparsities), ":", color=_style.INK, label="time by keys kept")
    for label, own, style in _lines(rows):
        own = own.sort_values("sparsity")
        left.plot(100 * (1 - own["density"]), own["speedup"], label=label, **style)
        right.plot(100 * own["recall"], own["speedup"], **style)
    left.set(xlabel="keys left out (%)", ylabel="× dense attention", yscale="log")
    right.set(xlabel="attention kept, mean over queries (%)")
    _style.plain_ticks(left.yaxis)
    for axes in (left, right):
        axes.axhline(1, color=_palette.DENSE, linewidth=1)
    _style.head(drawn, _finding(rows), [*left.lines[1:-1], left.lines[0]])
    first = rows.iloc[0]
    shape = f"{first['heads']:.0f} heads × {first['head_dim']:.0f}, {first['tokens']:,.0f} tokens"
    _style.notes(drawn, f"{shape}, {first['dtype']}, {_read.devices(rows)}; {first['maps']} maps.")
    return drawn


def _finding(rows):
    """Speed-ups of slices, choosing included where it was timed, and how many keys are left out."""
    chosen, exact = _chosen(rows), table_slices.attending(rows)
    own, how = (chosen, ", choosing included") if len(chosen) else (exact[exact["lengths"] == "equal"], "")
    if own.empty:
        return "Attention by lists of keys over dense attention"
    best = own.groupby("sparsity")["speedup"].max()
    shares = " to ".join(dict.fromkeys(f"{100 * share:.0f}" for share in (best.index.min(), best.index.max())))
    return f"Slices without {shares} % of the keys: {_style.times(best)} times as fast as dense attention{how}"


def _chosen(rows):
    """Rows of slices that a predictor chooses in each call: of several predictors the fastest one."""
    chosen = rows[(rows["call"] == "predict_attend") & (rows["group"] == SLICE)]
    if chosen.empty:
        return chosen
    return chosen[chosen["chosen_by"] == chosen.groupby("chosen_by")["speedup"].mean().idxmax()]


def _lines(rows):
    """``(label, rows, style)`` of each line, slices first."""
    attend = rows[rows["call"] == "attend"]
    for group in (SLICE, _BLOCKS):
        own = table_slices.attending(rows, group)
        own = own[own["lengths"] == "equal"]
        if len(own):
            look = _palette.look(group, "groups")
            yield f"Tilewright, {look.label}", own, look.line
    chosen = _chosen(rows)
    if len(chosen):
        look = _palette.look(chosen["chosen_by"].iloc[0], "choosers")
        yield f"slices, choosing included ({look.label})", chosen, look.line | {"linestyle": "--"}
    others = attend[(attend["provider"] != table_slices.OURS) & (attend["chosen_by"] == ORACLE)]
    for provider, own in others.groupby("provider", sort=False):
        look = _palette.look(provider, "sparse")
        fastest = own.sort_values(["sparsity", "speedup"]).iloc[-1]["group"]
        label = f"{look.label}, blocks {fastest.replace('x', ' × ')}"
        yield label, own[own["group"] == fastest], look.line
