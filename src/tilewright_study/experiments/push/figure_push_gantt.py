"""When the ports of each buffer of a program on push memories are in use.

The share in a bar is that of its cycles in which the port moves a word.
"""

from tilewright_study.experiments.push import table_push
from tilewright_study.figures import _contenders, _style

COLOURS = {"in": "#D55E00", "out": _contenders.BLUE}
LABELS = {"in": "words come in", "out": "words go out"}
# Apps that are shown, those with the most buffers in tiles.
APPS = 6


def needs(config):
    """What the table `push` needs."""
    return table_push.needs(config)


def draw(inputs):
    """One panel per app, a bar per port."""
    from matplotlib.patches import Patch

    ports = table_push.parts(inputs, "port")
    first = ports.drop_duplicates("app").set_index("app")["memory"] if len(ports) else {}
    ports = ports[[memory == first[app] for app, memory in zip(ports["app"], ports["memory"], strict=True)]]
    sizes = ports.groupby("app", sort=False).size().sort_values(ascending=False, kind="stable")
    shown = [app for app in dict.fromkeys(ports["app"]) if app in set(sizes.index[:APPS])]
    heights = [0.7 + 0.2 * sizes[app] for app in shown] or [1.0]
    drawn = _style.figure(9.6, 1.3 + sum(heights))
    panels = drawn.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, app in zip(panels, shown, strict=False):
        own = ports[ports["app"] == app].reset_index(drop=True)
        for at, row in own.iterrows():
            span = row["last"] - row["first"] + 1
            axes.barh(at, span, left=row["first"], height=0.72, color=COLOURS[row["side"]])
            axes.text(
                row["first"] + span / 2, at, f"{row['words'] / span:.0%}", ha="center", va="center", fontsize=6,
                color="white",
            )  # fmt: skip
        axes.set_yticks(range(len(own)), [f"{row['buffer']}: {row['name']}" for _, row in own.iterrows()], fontsize=6.5)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_title(f"{app}, {first[app]}", loc="left", fontsize=9)
    panels[-1].set_xlabel("cycle")
    handles = [Patch(color=COLOURS[name], label=label) for name, label in LABELS.items()]
    _style.head(drawn, "Ports of buffers in memory tiles", handles)
    _style.notes(
        drawn,
        [
            "A bar begins with a port's first word and ends with its last one; the number in it is the share of its "
            "cycles in which it moves a word. Of an app the four buffers that hold most are shown.",
        ],
    )
    return drawn
