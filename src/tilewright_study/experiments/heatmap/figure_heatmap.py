"""DynamicViT's training mask: speed-up over dense attention by resolution and patch size; hatched was not run."""

import itertools

import numpy as np

from tilewright_study.experiments.heatmap import table_heatmap
from tilewright_study.figures import _cells, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of the same name needs."""
    return table_heatmap.needs(config)


def draw(inputs):
    """A grid of cells: our number large, the paper's below it."""
    frame = table_heatmap.table(inputs).astype({"resolution": int, "patch": int})
    cells = frame.set_index(["resolution", "patch"])
    values = cells["speedup"].unstack().sort_index().sort_index(axis=1, ascending=False)
    theirs = cells["paper_speedup"].unstack().reindex_like(values)
    drawn = _style.figure(0.5 * len(values) + 1.9)
    axes = drawn.subplots()
    image = _cells.draw(axes, values.to_numpy(float), lift=0.16)
    for y, x in itertools.product(range(len(values)), range(len(values.columns))):
        if theirs.iat[y, x] > 0:
            dark = _cells.dark(values.iat[y, x])
            axes.text(
                x, y + 0.28, f"{theirs.iat[y, x]:.1f}", ha="center", va="center", color="white" if dark else _style.SOFT
            )
    axes.set_xticks(range(len(values.columns)), values.columns)
    axes.set_yticks(range(len(values)), values.index)
    axes.set(xlabel="patch size (px)", ylabel="resolution (px)", ylim=(len(values) - 0.5, -0.5))
    _cells.bar(drawn, image, axes)
    over = frame["speedup"].dropna()
    finding = (
        f"{_style.layer_name('dynamicvit')}: {_cells.finding(over)}" if len(over) else "DynamicViT's training mask"
    )
    _style.head(drawn, finding)
    _style.notes(
        drawn,
        f"Above: × dense by the fastest kernel ({_style.dense_names(frame)}; {_read.devices(frame)}). Below: the "
        f"paper's × FlashAttention (A100).{' Hatched: not run.' * bool(np.isnan(values.to_numpy()).any())}",
    )
    return drawn
