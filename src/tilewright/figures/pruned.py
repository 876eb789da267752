"""Pruned networks: speed-up of each strategy for the kept tokens over padding to the full length, in the same mode."""

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
    """A panel per network, with the first setting of its pruner, a line over the batch per strategy and mode."""
    from matplotlib.lines import Line2D

    frame = pruned.table(inputs)
    # What other settings keep is in `pruned_ratio`.
    frame = frame[frame["setting"] == frame.groupby("network", sort=False)["setting"].transform("first")]
    cases = list(frame.groupby(["network", "setting"], sort=False))
    across = min(ACROSS, len(cases))
    down = math.ceil(len(cases) / across)
    drawn = style.figure(max(9.6, 3.1 * across), 1.7 + 2.8 * down)
    panels = drawn.subplots(down, across, squeeze=False)
    for axes, ((network, setting), rows) in zip(panels.flat, cases, strict=False):
        for (strategy, mode), own in rows[rows["status"] == "ok"].groupby(["strategy", "mode"], sort=False):
            own = own.sort_values("batch")
            axes.plot(own["batch"], own["over_padded"], linestyle=LINES[mode], **contenders.look(strategy))
        ours = rows[(rows["strategy"] == pruned.OURS) & (rows["status"] == "ok")]
        most = f"to {ours['images_per_s'].max():,.0f} images/s" if len(ours) else "not measured"
        axes.set_title(f"{network}\n{setting or 'as published'}; {most}", fontsize=8.5)
        contenders.told(axes, rows["batch"])
    for axes in panels.flat[len(cases) :]:
        axes.set_axis_off()
    for axes in panels.flat[max(0, len(cases) - across) : len(cases)]:
        axes.set_xlabel("batch")
    for axes in panels[:, 0]:
        axes.set_ylabel("× padded to the full length")
    handles = [Line2D([], [], **contenders.look(name)) for name in contenders.ordered(frame["strategy"])]
    modes = [mode for mode in LINES if mode in set(frame["mode"])]
    handles += [Line2D([], [], color=style.INK, linestyle=LINES[mode], label=MODES[mode]) for mode in modes]
    style.head(drawn, "Pruned networks, from images to logits: speed-up in the same mode", handles, columns=4)
    judged = frame[frame["strategy"] != pruned.PADDED]
    same = f"{judged['same_tokens'].sum():,.0f} of {judged['inputs'].sum():,.0f}"
    style.notes(
        drawn,
        [
            f"{read.devices(frame)}, {', '.join(sorted(set(frame['dtype'])))}; random weights, crops of photographs; "
            f"until the logits are there; images/s: of {contenders.NAMES[pruned.OURS]}. {same} comparisons were of "
            "images that kept the same tokens as when padded: "
            f"of these, logits differ by at most {frame['max_abs_error'].max():.1g}.",
            *contenders.blanks(frame, "strategy", ["network", "mode"]),
        ],
        width=max(130, 48 * across),
    )
    return drawn
