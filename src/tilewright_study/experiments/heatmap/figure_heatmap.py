"""DynamicViT's training mask: speed-up over dense attention by resolution and patch size; blanks are hatched, with the
reason."""

import itertools
import string

import numpy as np

from tilewright_study.experiments.heatmap import table_heatmap
from tilewright_study.figures import _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of the same name needs."""
    return table_heatmap.needs(config)


def draw(inputs):
    """A grid of cells: our number large, the paper's small below it, a letter and its key where there is none."""
    import seaborn
    from matplotlib.colors import LogNorm

    frame = table_heatmap.table(inputs)
    frame = frame.astype({"resolution": int, "patch": int})
    cells = frame.set_index(["resolution", "patch"])
    values = cells["speedup"].unstack().sort_index().sort_index(axis=1, ascending=False)
    resolutions, patches = list(values.index), list(values.columns)
    drawn = _style.figure(0.78 * len(patches) + 2.6, 0.72 * len(resolutions) + 2.4)
    axes = drawn.subplots()
    # Centred on 1: blue is slower than dense, red faster, on a common scale of ratios.
    reach = max(1.05, np.exp(np.nanmax(np.abs(np.log(values.to_numpy())), initial=0.0)))
    scale = {"norm": LogNorm(1 / reach, reach), "vmin": 1 / reach, "vmax": reach, "cmap": "RdBu_r", "alpha": 0.85}
    numbers = {"annot": True, "fmt": ".2f", "annot_kws": {"fontsize": 10, "va": "bottom"}}
    seaborn.heatmap(values, ax=axes, cbar_kws={"label": "× dense (log scale)", "shrink": 0.9}, **scale, **numbers)
    reasons = {}
    for (y, resolution), (x, patch) in itertools.product(enumerate(resolutions), enumerate(patches)):
        row, value = cells.loc[resolution, patch], values.iat[y, x]
        if np.isnan(value):
            letter = reasons.setdefault(row["reason"] or row["status"], string.ascii_lowercase[len(reasons) % 26])
            _blank(axes, x, y, letter)
        if row["paper_speedup"] > 0:
            small = {"ha": "center", "va": "center", "fontsize": 7.5}
            axes.text(x + 0.5, y + 0.74, f"{row['paper_speedup']:.1f}", **small)
    for text in axes.texts:
        x, y = (int(place) for place in text.get_position())
        # Seaborn's own choice is white on pale cells, too. A blank cell compares as false.
        dark = abs(np.log(values.iat[y, x])) > 0.65 * np.log(reach)
        text.set_color("white" if dark else _style.INK)
    axes.set(
        xlabel="patch size (px)", ylabel="resolution (px)", title=f"{_style.layer_name('dynamicvit')}: plan over dense"
    )
    axes.grid(False)
    axes.tick_params(length=0, rotation=0)
    _ticks(axes.collections[0].colorbar, reach)
    device = _read.devices(frame)
    _style.notes(
        drawn,
        [
            f"Large: measured × dense, the fastest kernel ({_style.dense_names(frame)}; {device}). "
            "Small: the paper's × FlashAttention (A100). "
            "Hatched: not measured.",
            *(f"({letter}) {reason}" for reason, letter in reasons.items()),
        ],
    )
    return drawn


def _blank(axes, x, y, letter):
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 1, 1, facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="////", linewidth=0))
    box = {"facecolor": "#F2F2F2", "edgecolor": "none", "pad": 1}
    axes.text(x + 0.5, y + 0.4, f"({letter})", ha="center", va="center", fontsize=8, color="#555555", bbox=box)


def _ticks(bar, reach):
    """Plain numbers at the colour bar."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    steps = [value for value in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20) if 1 / reach <= value <= reach]
    bar.ax.yaxis.set_major_locator(FixedLocator(steps))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
