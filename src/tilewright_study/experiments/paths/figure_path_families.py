"""Paths of several networks against static ones: mean IoU over time of each table, and of all tables together.

Mean IoU over time for the table of each network, and for all tables together, beside static networks: the full paths of
what the recipe plain trained. At each time a front has the path that scenes of choice prefer; its mean IoU is that of
scenes of test.
"""

import itertools

from tilewright_study import training
from tilewright_study.experiments.paths import table_paths
from tilewright_study.figures import _paths, _style
from tilewright_study.tables import _read

COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#44AA99", "#999933")
# Where there are more networks than colours. Dashes are static networks.
DOTS = ("-", ":", "-.")


def needs(config):
    """What the table `paths` needs."""
    return table_paths.needs(config)


def draw(inputs):
    """A panel for networks that have `paths.ALIKE` alike: fronts of median times, as claims have them."""
    from matplotlib.lines import Line2D

    rows = table_paths.table(inputs)
    rows = rows[rows["rung"] == "trained"]
    groups = list(rows.groupby(table_paths.ALIKE, sort=False))
    styles = [
        {"color": colour, "linestyle": dots, "linewidth": 1.5} for dots, colour in itertools.product(DOTS, COLOURS)
    ]
    lines = dict(zip(dict.fromkeys(rows["case"]), itertools.cycle(styles)))
    drawn = _style.figure(8.6, 1.9 + 4.2 * len(groups))
    for axes, (key, own) in zip(drawn.subplots(len(groups), squeeze=False)[:, 0], groups, strict=True):
        kept = own[own["kept"] == "yes"]
        static = table_paths.static(own)
        slowest_us = max(each["p50_us"].max() for each in (kept, static) if len(each))
        if len(lines) > 1:
            _step(axes, table_paths.front(kept), slowest_us, color=_style.PALE, linewidth=6, zorder=1)
        for case, of_case in kept.groupby("case", sort=False):
            _step(axes, table_paths.front(of_case), slowest_us, zorder=3, **lines[case])
        theirs = table_paths.static_front(static)
        _step(axes, theirs, slowest_us, color=_style.PAPER, linewidth=1.3, linestyle="--", zorder=2)
        _paths.stars(axes, static, "p50_ms")
        axes.set(xlabel="time (ms)", ylabel="mean IoU, scenes of test (%)", xlim=(0, None), ylim=(0, None))
        of_code = f", code {key[-1]}" if rows["kernels"].nunique() > 1 else ""
        axes.set_title(f"{key[0]} px, {key[2]}{of_code}", loc="left")
    handles = [Line2D([], [], label=case, **style) for case, style in lines.items()]
    if len(lines) > 1:
        handles.append(Line2D([], [], color=_style.PALE, linewidth=6, label="all tables together"))
    title = "Paths of all networks"
    if len(table_paths.static(rows)):
        title += ", against static ones"
        handles.append(Line2D([], [], linewidth=1.3, linestyle="--", label="static networks", **_paths.STAR))
    _style.head(drawn, title, handles, columns=3)
    _style.notes(
        drawn,
        [
            f"{_read.devices(rows)}, {', '.join(sorted(set(rows['dtype'])))}. At each time the path that scenes of "
            "choice prefer, as scenes of test see it, with the statistics of the training. Static networks, by scenes "
            f"of test, are the full paths of what the recipes {' and '.join(training.STATIC)} trained.",
        ],
    )
    return drawn


def _step(axes, front, slowest_us, **style):
    """A front, up to the time of the slowest path."""
    if len(front):
        axes.step(
            [*front.index / 1e3, slowest_us / 1e3], 100 * front.iloc[[*range(len(front)), -1]], where="post", **style
        )
