"""Seconds until a memory tile is configured, by the length of its stream, engine and component; the published ones
beside.

Seconds until a memory tile is configured, by the length of its stream: by algebra on what its controllers did, and by
model checking of its RTL, component by component. Crosses are the published configurator's times for the identity of 16
× 16 words, on a machine that is not known.
"""

from tilewright_study.experiments.configure import table_configure
from tilewright_study.figures import _contenders, _style

# By component; a controller has the colour of what it is.
PARTS = {"": _contenders.BLUE, "agg": "#D55E00", "sram": "#009E73", "tb": "#CC79A7"}
CONTROLLER = "#777777"
LABELS = {"": "all together", "agg": "aggregators", "sram": "memory", "tb": "transpose buffers"}
PUBLISHED = "#222222"
# What stands for no time at all on a logarithmic axis.
LEAST_S = 1e-3


def needs(config):
    """What the table needs."""
    return table_configure.needs(config)


def draw(inputs):
    """Two panels: algebra and model checking."""
    from matplotlib.lines import Line2D

    frame, paper = table_configure.components(inputs), table_configure.published(inputs)
    frame = frame[frame["status"] == "ok"]
    drawn = _style.figure(9.6, 4.6)
    panels = drawn.subplots(1, 2, sharey=True)
    fit, bmc = frame[frame["solved_by"] == "fit"], frame[frame["solved_by"] == "bmc"]
    for axes, rows, title in zip(panels, (fit, bmc), ("algebra (fit)", "model checking (bmc)"), strict=True):
        axes.set_title(title, loc="left")
        axes.set(xscale="log", yscale="log", xlabel="cycles of the stream")
        for component, own in rows.groupby("component"):
            colour = PARTS.get(component, CONTROLLER)
            alone = component not in PARTS
            marker, size = ("D", 42) if component == "" else ("o", 30 if not alone else 16)
            axes.scatter(
                own["cycles"], own["seconds"].clip(lower=LEAST_S), s=size, marker=marker, color=colour, alpha=0.85
            )
    panels[0].set_ylabel("seconds")
    for _, row in paper.iterrows():
        panels[1].scatter(row["cycles"], row["paper_seconds"], s=46, marker="x", color=PUBLISHED)
        what = f"{LABELS.get(row['component'], 'whole tile')}, {row['task']}"
        panels[1].annotate(
            what, (row["cycles"], row["paper_seconds"]), (-7, -2), textcoords="offset points", fontsize=7.5, ha="right"
        )
    if len(fit):
        panels[0].axhline(1, color="#AAAAAA", linewidth=0.8, linestyle="--")
        panels[0].text(fit["cycles"].min(), 1.15, "what is asked for: 1 s", fontsize=7.5, color="#777777")
    for axes in panels:
        axes.margins(x=0.12)
        for axis in (axes.xaxis, axes.yaxis):
            _style.plain_ticks(axis)
    handles = [
        Line2D([], [], linestyle="", marker="D" if name == "" else "o", color=PARTS[name], label=LABELS[name])
        for name in PARTS
    ]
    handles += [
        Line2D([], [], linestyle="", marker="o", markersize=4, color=CONTROLLER, label="one controller"),
        Line2D([], [], linestyle="", marker="x", color=PUBLISHED, label="published, machine unknown"),
    ]
    _style.head(drawn, "Memory tiles configured from what goes in and comes out", handles, 3)
    _style.notes(
        drawn,
        [
            f"{', '.join(sorted(set(frame['device'])))}, one core. Each point was run over its whole stream by the "
            "model and, where it could be built, by the RTL, and every word compared. Points of a stream that was "
            "configured whole are of its components too: schedules inside of the tile are chosen first, by algebra. "
            "The published whole tile was one question about its ports alone.",
        ],
    )
    return drawn
