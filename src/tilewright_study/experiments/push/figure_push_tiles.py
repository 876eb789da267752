"""Programs on push memories: memory tiles, and cycles to the last output, with the published numbers.

Short lines are published numbers: the paper's, and those of its public designs.
"""

from tilewright_study.experiments.push import table_push
from tilewright_study.figures import _contenders, _style

COLOURS = {"pub": _contenders.BLUE, "dp": "#E69F00"}
LABELS = {"pub": "pub: wide words, one port", "dp": "dp: single words, two ports"}
PUBLISHED = "#222222"


def needs(config):
    """What the table `push` needs."""
    return table_push.needs(config)


def draw(inputs):
    """Two panels: tiles and cycles, a bar per app and memory."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = table_push.table(inputs)
    found = found[found["tiles"].notna()]
    apps, memories = list(dict.fromkeys(found["app"])), list(dict.fromkeys(found["memory"]))
    drawn = _style.figure(max(7.0, 1.4 + 1.15 * len(apps)), 5.6)
    panels = drawn.subplots(2, 1, sharex=True)
    width = 0.8 / max(1, len(memories))
    columns = (("tiles", "paper_tiles", "memory tiles"), ("last_cycle", "paper_last_cycle", "cycle of the last output"))
    for axes, (ours, paper, title) in zip(panels, columns, strict=True):
        if not len(found):
            _style.nothing(axes, "no app was mapped")
            continue
        # A label as high as this, on a logarithmic axis, would hide the published number above its bar.
        near = float(max(found[ours].max(), found[paper].max()) / found[ours].min()) ** 0.07
        for number, memory in enumerate(memories):
            own = found[found["memory"] == memory].set_index("app")
            places = [apps.index(app) - 0.4 + width * (number + 0.5) for app in own.index]
            axes.bar(places, own[ours], width * 0.94, color=COLOURS[memory])
            for place, value, known in zip(places, own[ours], own[paper], strict=True):
                top = max(value, known) if known < near * value else value
                axes.annotate(
                    f"{value:,.0f}", (place, top), (0, 4), textcoords="offset points", ha="center", fontsize=7
                )
            axes.scatter(places, own[paper], s=34, marker="_", linewidths=2, color=PUBLISHED, zorder=3)
        axes.set(yscale="log", ylabel=title)
        axes.margins(y=0.16)
        axes.grid(False, axis="x")
        _style.plain_ticks(axes.yaxis)
    panels[1].set_xticks(range(len(apps)), [_style.folded(app) for app in apps])
    handles = [Patch(color=COLOURS[memory], label=LABELS[memory]) for memory in memories]
    handles.append(Line2D([], [], linestyle="", marker="_", markeredgewidth=2, color=PUBLISHED, label="published"))
    _style.head(drawn, "Programs on push memories", handles)
    wrong = found[["wrong_model", "wrong_rtl"]].fillna(0).sum(axis=1)
    _style.notes(
        drawn,
        [
            f"{int((wrong == 0).sum())} of {len(found)} give each word of numpy, in a model of the array"
            f"{' and in RTL' if found['wrong_rtl'].notna().all() else ''}. The number behind a name is the side of the "
            "image. Published: the paper's tiles, for cascade, camera and unsharp its public designs', as are the "
            "cycles of the images of 64; they end a cycle after their last output.",
        ],
    )
    return drawn
