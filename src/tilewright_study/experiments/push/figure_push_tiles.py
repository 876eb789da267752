"""Programs on push memories: how many memory tiles each takes, beside the published numbers.

Memory tiles of each program on two kinds of memory. Bars are the published numbers: the paper's, and those of its
public designs. The number behind a name is the side of the image.
"""

from tilewright_study.experiments.push import table_push
from tilewright_study.figures import _palette, _style


def needs(config):
    """What the table `push` needs."""
    return table_push.needs(config)


def draw(inputs):
    """A row per program, a mark per memory."""
    from matplotlib.lines import Line2D

    found = table_push.table(inputs)
    mapped = found[found["tiles"].notna()]
    if mapped.empty:
        return _style.nothing("Programs on push memories", found["reason"])
    apps = list(dict.fromkeys(mapped.sort_values("tiles", kind="stable")["app"]))
    memories = _palette.in_order(mapped["memory"], "memories")
    drawn = _style.figure(1.3 + 0.36 * len(apps))
    axes = drawn.subplots()
    handles = []
    for number, memory in enumerate(memories):
        own, look = mapped[mapped["memory"] == memory], _palette.look(memory, "memories")
        places = [apps.index(app) + 0.36 * ((number + 0.5) / len(memories) - 0.5) for app in own["app"]]
        axes.plot(own["paper_tiles"], places, "|", color=look.colour, markersize=13, markeredgewidth=3, alpha=0.35)
        handles += axes.plot(
            own["tiles"],
            places,
            linestyle="none",
            marker=look.marker,
            color=look.colour,
            markersize=5.5,
            label=look.label,
        )
    for (app, value), _ in mapped.groupby(["app", "tiles"]):
        axes.annotate(f"{value:,.0f}", (value, apps.index(app)), (9, 0), textcoords="offset points", va="center")
    published = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 3, "color": "#AAAAAA"}
    handles.append(Line2D([], [], label="published", **published))
    axes.set_yticks(range(len(apps)), [app.replace("_", " ").replace("-", ", ") for app in apps])
    axes.set(xscale="log", xlabel="memory tiles", ylim=(len(apps) - 0.4, -0.6))
    most = mapped[["tiles", "paper_tiles"]].max().max()
    axes.set_xlim(0.8, 1.4 * most)
    _style.plain_ticks(axes.xaxis)
    axes.grid(axis="y", visible=False)
    _style.head(drawn, _finding(mapped), handles)
    wrong = mapped[["wrong_model", "wrong_rtl"]].fillna(0).sum(axis=1)
    rtl = " and in RTL" if mapped["wrong_rtl"].notna().all() else ""
    right = f"{int((wrong == 0).sum())} of {len(mapped)} give each word of numpy"
    _style.notes(drawn, f"{right}, in a model of the array{rtl}.")
    return drawn


def _finding(rows):
    """How often no more tiles are needed than were published."""
    known = rows[rows["paper_tiles"] > 0]
    if known.empty:
        return "Memory tiles of programs on push memories"
    least = (known["tiles"] <= known["paper_tiles"]).sum()
    return f"Programs take as many memory tiles as published or fewer in {least} of {len(known)} cases"
