"""DynamicViT's training mask: speed-up over dense attention by resolution and patch size; blanks are hatched, with the
reason."""

import string

import numpy as np

from tilewright.study.figures import _style
from tilewright.study.tables import _read, heatmap


def needs(config):
    """What the table of the same name needs."""
    return heatmap.needs(config)


def draw(inputs):
    """A grid of cells: our number large, the paper's small below it, a letter and its key where there is none."""
    from matplotlib.colors import LogNorm

    frame = heatmap.table(inputs)
    patches = sorted(set(frame["patch"].astype(int)), reverse=True)
    resolutions = sorted(set(frame["resolution"].astype(int)))
    values = np.full((len(resolutions), len(patches)), np.nan)
    reasons = {}
    drawn = _style.figure(0.78 * len(patches) + 2.6, 0.72 * len(resolutions) + 2.4)
    axes = drawn.subplots()
    for row in frame.itertuples():
        y, x = resolutions.index(row.resolution), patches.index(row.patch)
        values[y, x] = row.speedup
    # Centred on 1: blue is slower than dense, red faster, on a common scale of ratios.
    reach = max(1.05, np.exp(np.nanmax(np.abs(np.log(values)), initial=0.0)))
    picture = axes.imshow(values, cmap="RdBu_r", norm=LogNorm(1 / reach, reach), aspect="auto", alpha=0.85)
    for row in frame.itertuples():
        y, x = resolutions.index(row.resolution), patches.index(row.patch)
        colour = _style.INK
        if np.isnan(values[y, x]):
            letter = reasons.setdefault(row.reason or row.status, string.ascii_lowercase[len(reasons) % 26])
            _blank(axes, x, y, letter)
        else:
            colour = "white" if abs(np.log(values[y, x])) > 0.65 * np.log(reach) else _style.INK
            axes.text(x, y - 0.1, f"{values[y, x]:.2f}", ha="center", va="center", fontsize=10, color=colour)
        if row.paper_speedup > 0:
            axes.text(x, y + 0.3, f"{row.paper_speedup:.1f}", ha="center", va="center", fontsize=7.5, color=colour)
    axes.set_xticks(range(len(patches)), patches)
    axes.set_yticks(range(len(resolutions)), resolutions)
    axes.set(
        xlabel="patch size (px)", ylabel="resolution (px)", title=f"{_style.layer_name('dynamicvit')}: plan over dense"
    )
    axes.grid(False)
    axes.tick_params(length=0)
    _colour_bar(drawn, picture, axes, reach)
    device = _read.devices(frame)
    _style.notes(
        drawn,
        [
            f"Large: measured × dense, the fastest kernel ({_style.dense_names(frame)}; {device}). "
            "Small: the paper's × FlashAttention (A100). "
            "Hatched: not measured.",
            *(f"({letter}) {reason}" for reason, letter in reasons.items()),
        ],
        width=int(13 * len(patches) + 30),
    )
    return drawn


def _blank(axes, x, y, letter):
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="////", linewidth=0)
    )
    box = {"facecolor": "#F2F2F2", "edgecolor": "none", "pad": 1}
    axes.text(x, y - 0.1, f"({letter})", ha="center", va="center", fontsize=8, color="#555555", bbox=box)


def _colour_bar(drawn, picture, axes, reach):
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    steps = [value for value in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20) if 1 / reach <= value <= reach]
    bar = drawn.colorbar(picture, ax=axes, label="× dense (log scale)", shrink=0.9)
    bar.ax.yaxis.set_major_locator(FixedLocator(steps))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
