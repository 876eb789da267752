"""Static networks beside paths, as figures show them."""

from tilewright_study import training
from tilewright_study.figures import _style

STAR = {"marker": "*", "color": _style.PAPER}


def stars(axes, static, time_ms):
    """A star for each of `static` networks at the column `time_ms`, with its size, and its recipe where that is not the
    first of `training.STATIC`."""
    axes.scatter(static[time_ms], 100 * static["test"], s=70, zorder=4, **STAR)
    for row in static.itertuples():
        size, recipe = row.network.split("-")[1], row.case.rpartition(".")[2]
        label = size if recipe == training.STATIC[0] else f"{size} {recipe}"
        axes.annotate(label, (getattr(row, time_ms), 100 * row.test), (3, -10), textcoords="offset points", fontsize=8)
