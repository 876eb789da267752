"""Cells of speed-ups by two sizes: red where a plan is faster, blue where it is slower, hatched where none was run."""

import itertools

import numpy as np

from tilewright_study.figures import _style

# Colours saturate here: a large ratio would leave those near 1 pale.
REACH = 4.0
# Of the logarithm of `REACH`, from where on a cell is too dark for dark letters.
_DARK = 0.65
_ALPHA = 0.85


def dark(value):
    """Whether letters on the cell of a speed-up have to be white. A blank cell compares as false."""
    return abs(np.log(value)) > _DARK * np.log(REACH)


def draw(axes, values, lift=0.0):
    """Cells of `values`, float [rows, columns], with their numbers, `lift` of a cell above its middle; returns the
    image."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    shades = {"cmap": "RdBu_r", "norm": LogNorm(1 / REACH, REACH), "alpha": _ALPHA}
    image = axes.imshow(np.clip(values, 1 / REACH, REACH), aspect="auto", **shades)
    for y, x in itertools.product(*map(range, values.shape)):
        if np.isnan(values[y, x]):
            blank = {"facecolor": "#F2F2F2", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **blank))
            continue
        text = f"{values[y, x]:.1f}" if values[y, x] >= 9.95 else f"{values[y, x]:.2f}"
        colour = "white" if dark(values[y, x]) else _style.INK
        axes.text(x, y - lift, text, ha="center", va="center", color=colour)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(-0.5, values.shape[0] - 0.5))
    return image


def bar(drawn, image, axes):
    """A colour bar with plain numbers; what is beyond its ends has the colour of the end."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = drawn.colorbar(image, ax=axes, label="× dense (log scale)", shrink=0.9, pad=0.015, extend="both")
    found.ax.yaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4]))
    found.ax.yaxis.set_minor_locator(NullLocator())
    found.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def finding(over):
    """What cells say, in words: how many times as fast all of them are, or how many are faster."""
    if min(over) > 1:
        return f"{_style.times(over)} times as fast as dense attention"
    return f"faster than dense attention in {sum(over > 1)} of {len(over)} cases, {_style.times(over)} times"
