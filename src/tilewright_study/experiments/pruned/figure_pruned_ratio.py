"""Pruned networks by how much they keep: speed-up of each batching over padding to the full length, at the largest
batch.

What keeping fewer tokens gains: speed-up of whole pruned DeiTs over the network that is padded to the full length, at
the largest batch, for each setting of the pruner; as CUDA graphs where there are some. The horizontal axis is the share
of tokens left after the last pruning. See the figure of pruned networks for batches and modes.
"""

from tilewright_study import experiments
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read, _select

# Settings by which images differ by more than this share of their tokens stand apart.
UNEQUAL = 0.2


def needs(config):
    """The files of networks that are run with several settings of their pruner."""
    several = {network for network, settings in config.pruned.settings.items() if len(settings) > 1}
    files = zip(experiments.cases("pruned", config), _select.logs(config, "pruned"), strict=True)
    return [path for network, path in files if network in several]


def draw(inputs):
    """A panel per network, a line over the tokens that are kept per batching; as CUDA graphs where there are some."""
    from matplotlib.lines import Line2D

    frame = table_pruned.table(inputs)
    timed = frame[frame["status"] == "ok"]
    mode = "graph" if "graph" in set(timed["mode"]) else "eager"
    timed = timed[timed["mode"] == mode]
    timed = timed[timed["batch"] == timed.groupby("network")["batch"].transform("max")]
    timed = timed.assign(kept=(timed["fewest_kept"] + timed["most_kept"]) / 2 / timed["tokens"])
    cases = list(frame.groupby("network", sort=False))
    names = _contenders.in_order(timed["batching"])
    drawn, panels = _contenders.grid(len(cases), 2.6, "tokens kept (%)", sharey=True)
    for axes, (network, _) in zip(panels, cases, strict=True):
        rows = timed[timed["network"] == network].sort_values("kept")
        for batching in _contenders.in_order(rows["batching"]):
            own = rows[rows["batching"] == batching]
            line = _contenders.line_style(batching, names)
            for apart, points in own.groupby(own["spread"] > UNEQUAL * own["tokens"]):
                alone = {"linestyle": "", "marker": "D", "markerfacecolor": "none"} if apart else {}
                axes.plot(100 * points["kept"], points["over_padded"], **line | alone)
        said = f"batch {rows['batch'].iloc[0]:.0f}" if len(rows) else "not measured"
        axes.set_title(f"{network}\n{said}", fontsize=8.5)
        axes.set_xlim(0, 103)
    handles = [Line2D([], [], **_contenders.line_style(name, names)) for name in names]
    _style.head(drawn, "Pruned networks: what keeping fewer tokens gains", handles, columns=3)
    _style.notes(
        drawn,
        [
            f"{_read.devices(frame)}, {', '.join(sorted(set(frame['dtype'])))}, "
            f"{'as CUDA graphs' if mode == 'graph' else 'kernel by kernel'}. Tokens kept: after the last pruning, the "
            "middle of the fewest and the most of an image; the blocks before have more. Diamonds: settings by which "
            f"images differ by more than {UNEQUAL:.0%} of their tokens.",
        ],
    )
    return drawn
