"""Windowed attention on push memories: cycles beside those of the sums alone, and words that come in from outside."""

from tilewright_study.experiments.push_attention import table_push_attention
from tilewright_study.figures import _contenders, _style

BOUND, GATHERED = "#999999", "#D55E00"


def needs(config):
    """What the table of the same name needs."""
    return table_push_attention.needs(config)


def draw(inputs):
    """Two panels, a group of bars per workload."""
    from matplotlib.patches import Patch

    found = table_push_attention.table(inputs)
    found = found[found["cycles_global"].notna()].reset_index(drop=True)
    drawn = _style.figure(9.6, 4.2)
    panels = drawn.subplots(1, 2)
    columns = (
        ("cycles", (("bound", BOUND), ("cycles_global", _contenders.BLUE))),
        ("words of K and V from outside", (("words", _contenders.BLUE), ("gathered", GATHERED))),
    )
    for axes, (title, pairs) in zip(panels, columns, strict=True):
        if not len(found):
            _style.nothing(axes, "no workload was streamed")
            continue
        for number, (column, colour) in enumerate(pairs):
            bars = axes.bar(found.index - 0.2 + 0.4 * number, found[column], 0.38, color=colour)
            axes.bar_label(bars, [f"{value:,.0f}" for value in found[column]], fontsize=7, padding=2)
        axes.set_title(title, loc="left")
        axes.set(yscale="log")
        axes.margins(y=0.14)
        axes.set_xticks(found.index, [_style.folded(model, 18) for model in found["model"]])
        axes.grid(False, axis="x")
        _style.plain_ticks(axes.yaxis)
    handles = [
        Patch(color=BOUND, label="multiply-adds alone, 384 a cycle"),
        Patch(color=_contenders.BLUE, label="push memories"),
        Patch(color=GATHERED, label="each pass fetches its own keys"),
    ]
    _style.head(drawn, "Windowed attention on push memories", handles)
    times = [f"{row['model']} {row['ms']:.3f} ms" for _, row in found.iterrows()]
    _style.notes(
        drawn,
        [
            f"At the published 900 MHz: {', '.join(times)}. Queries, keys and values are there, projections are not "
            "included, and no chip was made. Each query's keys are its row of the workload's graph, for "
            f"{int((found['queries'] == 0).sum())} of {len(found)} workloads.",
        ],
    )
    return drawn
