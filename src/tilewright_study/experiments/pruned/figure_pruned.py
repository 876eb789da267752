"""Pruned networks: speed-up of each batching for the kept tokens over padding to the full length, in the same mode."""

from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read

# By mode, `networks.batching.MODES`.
LINES = {"eager": "-", "graph": "--", "compile": ":", "compile_graph": "-."}
MODES = {
    "eager": "solid: as it is",
    "graph": "dashed: CUDA graph",
    "compile": "dotted: torch.compile",
    "compile_graph": "dash-dotted: torch.compile in a CUDA graph",
}

# Laid over a mark of ours where it is a tie.
_TIE = {"linestyle": "none", "marker": "o", "markersize": 2.2, "color": "white", "zorder": 4}


def needs(config):
    """What the table of the same name needs."""
    return table_pruned.needs(config)


def draw(inputs):
    """A panel per network, with the first setting of its pruner, a line over the batch per batching and mode."""
    from matplotlib.lines import Line2D

    frame = table_pruned.table(inputs)
    # What other settings keep is in `pruned_ratio`.
    frame = frame[frame["setting"] == frame.groupby("network", sort=False)["setting"].transform("first")]
    cases = list(frame.groupby(["network", "setting"], sort=False))
    names = _contenders.in_order(frame["batching"])
    drawn, panels = _contenders.grid(len(cases), 2.8, "batch")
    for axes, ((network, setting), rows) in zip(panels, cases, strict=True):
        for (batching, mode), own in rows[rows["status"] == "ok"].groupby(["batching", "mode"], sort=False):
            own = own.sort_values("batch")
            axes.plot(
                own["batch"], own["over_padded"], linestyle=LINES[mode], **_contenders.line_style(batching, names)
            )
            tied = own[own["ties"].str.contains("fair") & (batching == table_pruned.OURS)]
            if len(tied):
                axes.plot(tied["batch"], tied["over_padded"], **_TIE)
        ours = rows[(rows["batching"] == table_pruned.OURS) & (rows["status"] == "ok")]
        most = f"to {ours['images_per_s'].max():,.0f} images/s" if len(ours) else "not measured"
        axes.set_title(f"{network}\n{setting or 'as published'}; {most}", fontsize=8.5)
        _contenders.log_ticks(axes, rows["batch"])
    handles = [Line2D([], [], **_contenders.line_style(name, names)) for name in names]
    modes = [mode for mode in LINES if mode in set(frame["mode"])]
    handles += [Line2D([], [], color=_style.INK, linestyle=LINES[mode], label=MODES[mode]) for mode in modes]
    _style.head(drawn, "Pruned networks, from images to logits: speed-up in the same mode", handles, columns=4)
    judged = frame[~frame["batching"].isin([table_pruned.PADDED, table_pruned.UNPRUNED])]
    same = f"{judged['same_tokens'].sum():,.0f} of {judged['inputs'].sum():,.0f}"
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}, {', '.join(sorted(set(frame['dtype'])))}; random weights, crops of photographs; "
            f"until the logits are there; images/s: of {_contenders.label(table_pruned.OURS)}. {same} comparisons were "
            "of images that kept the same tokens as when padded: "
            f"of these, logits differ by at most {frame['max_abs_error'].max():.1g}. Over all images, the least share "
            f"with the same most probable class is {judged['same_top1_all'].min():.1%}. "
            "Hollow: ours and the best other packed or dense form are within two standard errors of each other.",
            *_contenders.blanks(frame, "batching", ["network", "mode"]),
        ],
    )
    return drawn
