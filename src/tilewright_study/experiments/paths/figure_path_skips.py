"""What leaving out one block of a trained network saves in time, and what it costs in mean IoU, by rung.

What leaving out one block saves and costs, with the weights as they were trained and with the batch norm's statistics
measured for each path. Nothing is trained again.
"""

import numpy as np

from tilewright_study.experiments.paths import table_path_layers, table_paths
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read

RUNGS = {"trained": ("as trained", _contenders.BLUE), "statistics": ("batch norm of each path", "#E69F00")}


def needs(config):
    """What the table `paths` needs."""
    return table_paths.needs(config)


def draw(inputs):
    """A row of two panels per network: time saved, and points of mean IoU lost, by block."""
    from matplotlib.patches import Patch

    rows = table_paths.measured(inputs)
    cases = list(rows.groupby("case", sort=False))
    drawn = _style.figure(10.4, 1.5 + 3.1 * len(cases))
    rungs = list(dict.fromkeys(rows["rung"]))
    for (left, right), (case, own) in zip(drawn.subplots(len(cases), 2, squeeze=False), cases, strict=True):
        singles = own[(own["part"] == "single") & (own["base"] == own["full"])].dropna(subset="p50_us")
        singles = singles.assign(
            block=[table_path_layers._skipped(path).removeprefix("block ") for path in singles["path"]]
        )
        blocks = list(dict.fromkeys(singles["block"]))
        at = np.arange(len(blocks))
        full = own[own["path"] == own["full"]]["p50_us"].median()
        saved = singles.drop_duplicates("block").set_index("block")["saved_us"]
        left.bar(at, 100 * saved.reindex(blocks) / full, color="#9A9A9A", width=0.7)
        for place, rung in enumerate(rungs):
            lost = singles[singles["rung"] == rung].set_index("block")["lost"].reindex(blocks)
            width = 0.8 / len(rungs)
            right.bar(at - 0.4 + (place + 0.5) * width, 100 * lost, width=width, color=RUNGS[rung][1])
        for axes in (left, right):
            axes.set_xticks(at, blocks, fontsize=7.5, rotation=90 if len(blocks) > 20 else 0)
            axes.axhline(0, color=_style.INK, linewidth=0.6)
            axes.grid(axis="x", visible=False)
            axes.set_xlabel("stage.block that is left out")
            if not blocks:
                _style.nothing(axes, "not measured")
        left.set_ylabel("time saved (% of the full path's)")
        right.set_ylabel("mean IoU lost (points)")
        left.set_title(f"{case}: time", loc="left")
        right.set_title("mean IoU on scenes of fit", loc="left")
    handles = [Patch(facecolor="#9A9A9A", label="time")]
    handles += [Patch(facecolor=RUNGS[rung][1], label=RUNGS[rung][0]) for rung in rungs]
    _style.head(drawn, "Leaving out one block", handles)
    _style.notes(
        drawn,
        [
            f"{_read.devices(rows)}, {', '.join(sorted(set(rows['dtype'])))}. Times are of calls in turns with the "
            "full path's. No weight is trained after a block is left out.",
        ],
    )
    return drawn
