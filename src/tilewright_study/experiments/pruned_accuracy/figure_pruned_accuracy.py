"""Pruned networks that were trained: images named right over images a second, for each pruner and how much it keeps."""

from tilewright.networks.batching import UNPRUNED
from tilewright_study import scenes
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.experiments.pruned_accuracy import table_pruned_accuracy
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read

# Whose classes are counted.
ENTERED = ("tilewright_study.scenes.sources.crops",)
COLOURS = {"threshold_l2": "#E69F00", "dynamicvit": "#0072B2", "evit": "#009E73", "ats": "#CC79A7"}
NAMES = {"threshold_l2": "Threshold-L2", "dynamicvit": "DynamicViT", "evit": "EViT", "ats": "ATS"}
# What no other beats, under the lines of the pruners.
_FRONT = {"color": _style.INK, "linewidth": 3.5, "alpha": 0.25, "linestyle": "--", "zorder": 1}


def needs(config):
    """What the table of the same name needs."""
    return table_pruned_accuracy.needs(config)


def draw(inputs):
    """A panel per network, at its largest batch: a line per pruner with packed tokens, whiskers over the trainings;
    hollow marks are the same tokens padded, the cross is the network that keeps all, the dashes join what no other
    beats in both."""
    from matplotlib.lines import Line2D

    frame = table_pruned_accuracy.table(inputs)
    frame = frame[frame["batch"] == frame.groupby("network")["batch"].transform("max")]
    cases = list(frame.groupby(["network", "mode"], sort=False))
    pruners = [name for name in dict.fromkeys(frame["pruner"]) if name]
    colours = {name: COLOURS.get(name) or _contenders.further(name) for name in pruners}
    drawn = _style.figure(max(8.4, 5.4 * len(cases)), 5.2)
    for axes, ((network, mode), rows) in zip(drawn.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for pruner, own in rows[rows["pruner"] != ""].groupby("pruner", sort=False):
            own = own.sort_values("kept")
            ours, padded = (own[own["batching"] == name] for name in (table_pruned.OURS, table_pruned.PADDED))
            _line(axes, ours, colours[pruner], linewidth=1.8, marker="o", markersize=5, zorder=3)
            _line(
                axes,
                padded,
                colours[pruner],
                linewidth=0.8,
                marker="o",
                markersize=5,
                markerfacecolor="white",
                zorder=2,
            )
            for row in ours.itertuples():
                said = f"{row.kept:.0%}"
                axes.annotate(
                    said, (row.images_per_s, 100 * row.top1), (4, -9), textcoords="offset points", fontsize=6.5,
                    color=colours[pruner],
                )  # fmt: skip
        best = rows[rows["front"] == "yes"].sort_values("images_per_s")
        axes.plot(best["images_per_s"], 100 * best["top1"], **_FRONT)
        whole = rows[rows["batching"] == UNPRUNED].dropna(subset=["images_per_s", "top1"])
        if len(whole):
            axes.plot(
                whole["images_per_s"].median(), 100 * whole["top1"].mean(), linestyle="", marker="X", markersize=9,
                color=_style.INK, zorder=4,
            )  # fmt: skip
        timed = rows.dropna(subset="images_per_s")
        if not len(timed):
            _style.nothing(axes, "not measured")
        said = f"{network}, batch {rows['batch'].iloc[0]:.0f}, {MODES.get(mode, mode)}"
        trained = f"trainings: {rows['trainings'].max():.0f}, on {rows['images'].min():,.0f} images"
        axes.set_title(f"{said}\n{trained}", loc="left", fontsize=9)
        axes.set(xlabel="images a second", ylabel="top-1 on crops of new scenes (%)")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    handles = [
        Line2D([], [], color=colours[name], marker="o", markersize=5, linewidth=1.8, label=NAMES.get(name, name))
        for name in pruners
    ]
    mark = {"linestyle": "", "color": _style.INK}
    handles += [
        Line2D([], [], **mark, marker="X", markersize=8, label="not pruned"),
        Line2D([], [], **mark, marker="o", markerfacecolor="white", label=_contenders.label(table_pruned.PADDED)),
        Line2D([], [], **_FRONT, label="Pareto front"),
    ]
    _style.head(drawn, "Accuracy beside speed where tokens are pruned", handles, columns=3)
    packed = frame[frame["batching"] == table_pruned.OURS]
    changed, crops = packed["changed"].sum(), packed["crops"].sum()
    chance = 1 / len(scenes.create("crops").classes)
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}, {', '.join(sorted(set(frame['dtype'])))}. Networks are trained here, on crops of "
            "scenes; all pruners prune the same weights, DynamicViT's predictor is trained besides. Numbers at "
            "marks: tokens kept after the last pruning. Marks are means over the trainings, whiskers the least and the "
            f"most top-1; chance names {chance:.0%} right. "
            f"Packed tokens name otherwise than padded ones: {changed:,.0f} of {crops:,.0f} images.",
            *_contenders.blanks(_reasons(frame), "batching", ["network", "pruner", "setting"]),
        ],
    )
    return drawn


MODES = {
    "eager": "kernel by kernel",
    "graph": "one CUDA graph",
    "compile": "compiled",
    "compile_graph": "compiled graph",
}


def _line(axes, rows, colour, **style):
    """Top-1 over speed of `rows`, with whiskers from the least to the most top-1 of a training."""
    rows = rows.dropna(subset=["images_per_s", "top1"])
    off = [100 * (rows["top1"] - rows["least_top1"]), 100 * (rows["most_top1"] - rows["top1"])]
    axes.errorbar(rows["images_per_s"], 100 * rows["top1"], yerr=off, color=colour, elinewidth=0.8, capsize=2, **style)


def _reasons(frame):
    """Rows as notes on blanks take them."""
    return frame.assign(status=frame["images_per_s"].isna().map({True: "skipped or failed", False: "ok"}))
