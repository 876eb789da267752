"""Frames with budgets: how long the paths take that run, and what contenders miss and see in all."""

import numpy as np

from tilewright_study.experiments.stream import table_stream
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read

NAMES = {
    "closed": ("paths, with controller", _contenders.BLUE),
    "target": ("paths, with a share of late frames", "#CC79A7"),
    "open": ("paths, without a controller", "#56B4E9"),
    "full": ("always the best path", "#5A5A5A"),
    "fixed": ("one path for the least budget", "#E69F00"),
    "static": ("static networks, with controller", "#882255"),
    "oracle": ("an oracle of times", "#009E73"),
}
SHOWN = "closed"
# Percent that an axis shows at least, also where no budget was missed.
LEAST = 1.0
# Of the mean IoU that counts frames that came late.
FAINT = 0.3


def needs(config):
    """What the table of the same name needs."""
    return table_stream.needs(config)


def draw(inputs):
    """A row of panels per network and trace: frames of the paths with a controller, misses, mean IoU."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from tilewright_study.experiments.stream.traces import spans

    found, frames, _ = table_stream.rows(inputs)
    cases = list(found.groupby(["case", "trace"], sort=False))
    drawn = _style.figure(11.2, 1.6 + 2.7 * len(cases))
    shape = {"width_ratios": (3.2, 1, 1), "squeeze": False}
    for (over, left, right), ((case, trace), own) in zip(drawn.subplots(len(cases), 3, **shape), cases, strict=True):
        one = frames[(frames["case"] == case) & (frames["trace"] == trace) & (frames["contender"] == SHOWN)]
        late = (one["measured_us"] > one["budget_us"]).to_numpy()
        # Frames that are told stand side by side, wherever they are in the trace.
        numbers = one["frame"].to_numpy()
        places = np.arange(len(one))
        over.step(places, one["budget_us"] / 1e3, where="mid", color=_style.PAPER, linewidth=0.9)
        # A frame that the host lost to something else would hide all others: it stands at the edge.
        top = 1.15 * max(one["budget_us"].max(), one["measured_us"].quantile(0.98)) / 1e3
        shown = (one["measured_us"] / 1e3).clip(upper=0.97 * top).to_numpy()
        over.scatter(places, shown, s=7, color=_contenders.BLUE, zorder=3)
        over.scatter(
            places[late],
            shown[late],
            s=26,
            marker="x",
            color=_style.INK,
            zorder=4,
            linewidths=1,
        )
        for first, behind in spans(one["loaded"] > 0):
            over.axvspan(first - 0.5, behind - 0.5, color="#F2E6D8", zorder=0)
        for place in np.flatnonzero(np.diff(numbers) > 1):
            over.axvline(place + 0.5, color=_style.INK, linewidth=0.8, linestyle=":")
        if len(one):
            over.set_ylim(0, top)
        else:
            _style.nothing(over, "not told frame by frame")
        over.set(xlabel="frame", ylabel="time (ms)")
        over.xaxis.set_major_formatter(lambda place, _, numbers=numbers: _number(place, numbers))
        over.set_title(f"{case}: {trace}, {own['frames'].max():,.0f} frames", loc="left")
        own = own.set_index("contender").reindex([name for name in NAMES if name in set(own["contender"])])
        # Rows of before say nothing of frames in time.
        timely = own["timely_miou"].fillna(own["mean_miou"])
        colors = [NAMES[name][1] for name in own.index]
        late = 100 * (own["mean_miou"] - timely)
        right.barh(range(len(own)), late, left=100 * timely, color=colors, alpha=FAINT)
        for axes, values, most, what in (
            (left, own["missed"], own["missed"].max(), "budgets missed (%)"),
            (right, timely, own["mean_miou"].max(), "mean IoU of frames (%)"),
        ):
            bars = axes.barh(range(len(own)), 100 * values, color=colors)
            axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
            axes.set(xlabel=what, yticks=[], xlim=(0, max(LEAST, 130 * most)))
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=_style.PAPER, linewidth=1.2, label="budget"),
        Line2D([], [], linestyle="", marker="o", markersize=4, color=_contenders.BLUE, label="frame"),
        Line2D([], [], linestyle="", marker="x", color=_style.INK, label="frame that came late"),
        Patch(facecolor="#F2E6D8", label="foreign load"),
        *(Patch(facecolor=NAMES[name][1], label=NAMES[name][0]) for name in NAMES if name in set(found["contender"])),
    ]
    _style.head(drawn, "Frames with budgets", handles, columns=4)
    timed = "Mean IoU: a frame that came late counts 0; the faint end of a bar is what these would add. "
    timed = timed if found["timely_miou"].notna().any() else "Mean IoU counts late frames, too. "
    _style.notes(
        drawn,
        [
            f"{_read.devices(found)}, {', '.join(sorted(set(found['dtype'])))}; "
            "some frames are drawn, bars are of all. A camera moves, and each frame is labelled by the "
            "path that ran. Times end when maps are on the device. Frames that took longer than is drawn stand at the "
            f"edge. {timed}The best path is that on scenes of choice.",
        ],
    )
    return drawn


def _number(place, numbers):
    """The frame at a place of the axis, where one stands there."""
    return f"{numbers[int(place)]:.0f}" if place == int(place) and 0 <= place < len(numbers) else ""
