"""Pruned networks, from images to logits: speed-up of each batching of the kept tokens over padding to the full length.

Pruned networks, from images to logits: how many times as fast as the network that pads to the full length each batching
of the kept tokens is, a panel for each pruner. Lines join batches of one mode, as a CUDA graph where there is one.
Marks of Tilewright are hollow where it ties with the fastest other batching, within two standard errors.
"""

from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read

# Pruners that are shown, and those side by side.
_MOST, _ACROSS = 4, 2
# Modes, the first that was run is shown.
MODES = {
    "graph": "as CUDA graphs",
    "eager": "called",
    "compile": "compiled",
    "compile_graph": "compiled, as CUDA graphs",
}


def needs(config):
    """What the table of the same name needs."""
    return table_pruned.needs(config)


def draw(inputs):
    """A panel per pruner, of its first network and setting, a line over the batch per batching."""
    frame = table_pruned.table(inputs)
    found = frame[frame["over_padded"] > 0]
    if found[found["batching"] != table_pruned.PADDED].empty:
        return _style.nothing("Pruned networks, from images to logits", frame["reason"])
    mode = next(mode for mode in MODES if mode in set(found["mode"]))
    found = found[found["mode"] == mode]
    found = found.assign(pruner=found["network"].str.rpartition("-")[2])
    # Of each pruner the network that the fewest others lack, and its first setting.
    firsts = [rows[rows["network"] == _most(rows)] for _, rows in found.groupby("pruner", sort=False)][:_MOST]
    cases = [rows[rows["setting"] == rows["setting"].iloc[0]] for rows in firsts]
    down, across = -(-len(cases) // _ACROSS), min(_ACROSS, len(cases))
    names = _palette.in_order(set(found["batching"]) - {table_pruned.PADDED}, "batchings")
    drawn = _style.figure(1.5 + 2.1 * down)
    panels = drawn.subplots(down, across, squeeze=False, sharey=True)
    handles = {}
    for axes in panels.flat[len(cases) :]:
        axes.set_visible(False)
    for axes, rows in zip(panels.flat, cases, strict=False):
        for batching in names:
            own, look = rows[rows["batching"] == batching].sort_values("batch"), _palette.look(batching, "batchings")
            if own.empty:
                continue
            style = look.line | ({"linewidth": 2.2, "zorder": 3} if batching == table_pruned.OURS else {})
            (handles[batching],) = axes.plot(own["batch"], own["over_padded"], label=look.label, **style)
            tied = own[own["ties"].str.contains("fair") & (batching == table_pruned.OURS)]
            axes.plot(tied["batch"], tied["over_padded"], "o", markersize=2.5, color="white", zorder=4)
        axes.axhline(1, color=_palette.DENSE, linewidth=1)
        axes.set_title(_title(rows), loc="left")
        _style.log_ticks(axes.xaxis, rows["batch"])
    for axes in panels[:, 0]:
        axes.set_ylabel("× padded")
    for axes in panels[-1]:
        axes.set_xlabel("batch")
    _style.head(drawn, _finding(found), [handles[name] for name in names if name in handles])
    _style.notes(
        drawn,
        f"{_read.devices(found)}, {found['dtype'].iloc[0]}, {MODES[mode]}; random weights. × the same network "
        "padded to the full length. White dots: a tie with the fastest other batching.",
    )
    return drawn


def _most(rows):
    """The network with the most rows."""
    return rows.groupby("network", sort=False).size().idxmax()


def _title(rows):
    network, _, pruner = rows["network"].iloc[0].rpartition("-")
    kept = [value for value in (rows["fewest_kept"].min(), rows["most_kept"].max()) if value > 0]
    tokens = " to ".join(dict.fromkeys(f"{value:.0f}" for value in kept))
    name = f"{_style.network(network).partition(',')[0]}, {_palette.look(pruner, 'pruners').label}"
    return f"{name}: {tokens} tokens kept" if tokens else name


def _finding(rows):
    """How many times as fast as padding packed tokens are, at the largest batch, over all networks and settings."""
    ours = rows[(rows["batching"] == table_pruned.OURS)]
    if ours.empty:
        return "Pruned networks by how kept tokens are batched"
    batch = ours["batch"].max()
    over = ours.loc[ours["batch"] == batch, "over_padded"]
    return f"Packed, pruned networks are {_style.times(over)} times as fast as padded ones at batch {batch:.0f}"
