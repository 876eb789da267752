"""Pruned networks that were trained: images named right over images a second, for each pruner and how much it keeps.

Top-1 on crops of new scenes over images a second, at the largest batch, tokens packed: a line for each pruner, marks
from most tokens kept to fewest. Marks are means over the trainings, whiskers the least and the most top-1. The cross is
the network that keeps all tokens; the pale line joins what no other beats in both.
"""

from tilewright.networks.batching import UNPRUNED
from tilewright_study import scenes
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.experiments.pruned_accuracy import table_pruned_accuracy
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Whose classes are counted.
ENTERED = ("tilewright_study.scenes.sources.crops",)


def needs(config):
    """What the table of the same name needs."""
    return table_pruned_accuracy.needs(config)


def draw(inputs):
    """One panel: the network with the most rows, in the mode in which most images a second were named."""
    frame = table_pruned_accuracy.table(inputs)
    timed = frame.dropna(subset=["images_per_s", "top1"])
    finding = "Accuracy beside speed where tokens are pruned"
    if timed.empty:
        return _style.nothing(finding, frame["reason"])
    rows = timed[timed["network"] == timed.groupby("network", sort=False).size().idxmax()]
    rows = rows[rows["batch"] == rows["batch"].max()]
    rows = rows[rows["mode"] == rows.loc[rows["images_per_s"].idxmax(), "mode"]]
    drawn = _style.figure(4.2)
    axes = drawn.subplots()
    best = rows[rows["front"] == "yes"].sort_values("images_per_s")
    axes.plot(best["images_per_s"], 100 * best["top1"], color=_style.PALE, linewidth=6, zorder=1)
    packed = rows[(rows["pruner"] != "") & (rows["batching"] == table_pruned.OURS)]
    handles = []
    for pruner in _palette.in_order(packed["pruner"], "pruners"):
        own, look = packed[packed["pruner"] == pruner].sort_values("kept"), _palette.look(pruner, "pruners")
        off = [100 * (own["top1"] - own["least_top1"]), 100 * (own["most_top1"] - own["top1"])]
        drawn_line = axes.errorbar(
            own["images_per_s"], 100 * own["top1"], yerr=off, elinewidth=0.8, capsize=2, label=look.label, **look.line
        )
        handles.append(drawn_line.lines[0])
        handles[-1].set_label(look.label)
    whole = rows[rows["batching"] == UNPRUNED]
    look = _palette.look(UNPRUNED, "batchings")
    if len(whole):
        handles += axes.plot(
            whole["images_per_s"].median(), 100 * whole["top1"].mean(), label=look.label, linestyle="none",
            **look.line | {"markersize": 9, "zorder": 4, "linewidth": 0},
        )  # fmt: skip
    axes.set(xlabel="images a second", ylabel="top-1 on crops of new scenes (%)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _style.head(drawn, _finding(packed) or finding, handles)
    first = rows.iloc[0]
    kept = f"{packed['kept'].max():.0%} to {packed['kept'].min():.0%}" if len(packed) else "no"
    _style.notes(
        drawn,
        f"{_style.network(first['network'])}, batch {first['batch']:.0f}, {_read.devices(rows)}, {first['dtype']}. "
        f"Marks: {kept} of the tokens kept, mean of {rows['trainings'].max():.0f} trainings; whiskers: least and most. "
        f"Chance: {1 / len(scenes.create('crops').classes):.0%}.",
    )
    return drawn


def _finding(packed):
    """The pruner that loses least where at least a tenth of the time is saved."""
    fast = packed[(packed["over_unpruned"] >= 1.1) & packed["lost"].notna()]
    if fast.empty:
        return ""
    best = fast.loc[fast["lost"].idxmin()]
    name = _palette.look(best["pruner"], "pruners").label
    return f"{name} loses {max(0, best['lost']):.1f} points of top-1 at {best['over_unpruned']:.2f} times the speed"
