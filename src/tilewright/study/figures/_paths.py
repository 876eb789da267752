"""Static networks beside paths, as figures show them."""

from tilewright.study.figures import _style

STAR = {"marker": "*", "color": _style.PAPER}


def stars(axes, static, time_ms):
    """A star for each of `static` networks at the column `time_ms`, and its size beside it."""
    axes.scatter(static[time_ms], 100 * static["test"], s=70, zorder=4, **STAR)
    for row in static.itertuples():
        size = row.network.split("-")[1]
        axes.annotate(size, (getattr(row, time_ms), 100 * row.test), (3, -10), textcoords="offset points", fontsize=8)
