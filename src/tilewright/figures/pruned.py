"""Pruned networks: images a second over the batch, of each strategy for the kept tokens, in each mode."""

import math

from tilewright.figures import contenders, style
from tilewright.tables import pruned, read

# Panels side by side.
ACROSS = 4
LINES = {"eager": "-", "graph": "--", "compile": ":", "compile_graph": "-."}
MODES = {
    "eager": "solid: as it is",
    "graph": "dashed: CUDA graph",
    "compile": "dotted: torch.compile",
    "compile_graph": "dash-dotted: torch.compile in a CUDA graph",
}


def needs(config):
    """What the table of the same name needs."""
    return pruned.needs(config)


def draw(inputs):
    """A panel per network and setting of its pruner, a line per strategy and mode."""
    from matplotlib.lines import Line2D

    frame = pruned.table(inputs)
    cases = list(frame.groupby(["network", "setting"], sort=False))
    across = min(ACROSS, len(cases))
    down = math.ceil(len(cases) / across)
    drawn = style.figure(max(9.6, 3.1 * across), 1.7 + 2.8 * down)
    panels = drawn.subplots(down, across, squeeze=False)
    for axes, ((network, setting), rows) in zip(panels.flat, cases, strict=False):
        for (strategy, mode), own in rows[rows["status"] == "ok"].groupby(["strategy", "mode"], sort=False):
            own = own.sort_values("batch")
            axes.plot(own["batch"], own["images_per_s"], linestyle=LINES[mode], **contenders.look(strategy))
        best = rows.loc[rows["strategy"] == pruned.OURS, "over_padded"].max()
        over = f"to {style.ratio(best)} padded" if best > 0 else "not measured"
        axes.set_title(f"{network}\n{setting or 'as published'}; {over}", fontsize=8.5)
        axes.set_yscale("log")
        contenders.told(axes, rows["batch"])
        style.plain_ticks(axes.yaxis)
    for axes in panels.flat[len(cases) :]:
        axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("batch")
    for axes in panels[:, 0]:
        axes.set_ylabel("images/s")
    handles = [Line2D([], [], **contenders.look(name)) for name in contenders.ordered(frame["strategy"])]
    modes = [mode for mode in LINES if mode in set(frame["mode"])]
    handles += [Line2D([], [], color=style.INK, linestyle=LINES[mode], label=MODES[mode]) for mode in modes]
    style.head(drawn, "Pruned networks, from images to logits", handles, columns=4)
    judged = frame[frame["strategy"] != pruned.PADDED]
    same = f"{judged['same_tokens'].sum():,.0f} of {judged['inputs'].sum():,.0f}"
    style.notes(
        drawn,
        [
            f"{read.devices(frame)}, {', '.join(sorted(set(frame['dtype'])))}; random weights, crops of photographs; "
            f"until the logits are there. {same} comparisons were of images that kept the same tokens as when padded: "
            f"of these, logits differ by at most {frame['max_abs_error'].max():.1g}.",
            *contenders.blanks(frame, "strategy", ["network", "mode"]),
        ],
        width=max(130, 48 * across),
    )
    return drawn
