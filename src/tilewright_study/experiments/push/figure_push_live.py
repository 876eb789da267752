"""Words that memory tiles hold of a buffer while a program runs, and how many a tile has place for.

The dashed line is what one tile holds.
"""

from tilewright_study.experiments.push import table_push
from tilewright_study.figures import _contenders, _style

# Words of a tile, `pushmem.memories`.
CAPACITY = 2048
COLOURS = (_contenders.BLUE, "#D55E00", "#009E73", "#CC79A7")


def needs(config):
    """What the table `push` needs."""
    return table_push.needs(config)


def draw(inputs):
    """One panel per app on the first memory, a line for each of the buffers that hold most."""
    whole, live = table_push.parts(inputs, "whole"), table_push.parts(inputs, "live")
    apps = [app for app in dict.fromkeys(whole["app"]) if app in set(live["app"])]
    across = min(4, max(1, len(apps)))
    drawn = _style.figure(3.1 * across + 0.3, 1.2 + 2.3 * max(1, -(-len(apps) // across)))
    panels = drawn.subplots(-(-max(1, len(apps)) // across), across, squeeze=False).reshape(-1)
    for axes, app in zip(panels, apps, strict=False):
        memory = whole.loc[whole["app"] == app, "memory"].iloc[0]
        own = live[(live["app"] == app) & (live["memory"] == memory)]
        most = own["live"].max()
        for (buffer, rows), colour in zip(own.groupby("buffer", sort=False), COLOURS, strict=False):
            label = f"{buffer}, modulus {rows['modulus'].iloc[0]:,.0f}"
            axes.plot(rows["cycle"], rows["live"], color=colour, linewidth=1.2, label=label)
        axes.axhline(CAPACITY, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_title(f"{app}, {memory}: at most {most:,.0f}", loc="left", fontsize=9)
        axes.set(yscale="symlog", ylim=(0, 2 * max(CAPACITY, most)))
        axes.set_yticks([0, 10, 100, CAPACITY], ["0", "10", "100", f"{CAPACITY:,}"])
        axes.minorticks_off()
        axes.legend(fontsize=6.5, loc="lower center")
    for axes in panels[len(apps) :]:
        axes.set_visible(False)
    for axes in panels[::across]:
        axes.set_ylabel("live words")
    for axes in panels[max(0, len(apps) - across) : len(apps)]:
        axes.set_xlabel("cycle")
    _style.head(drawn, "Words that memory tiles hold")
    _style.notes(
        drawn,
        [
            "A word lives from the cycle in which it comes in to that of its last read; short distances are shift "
            "registers and not shown. Addresses may wrap at the modulus: no two words that live at once are so far "
            "apart. The dashed line is what one tile holds. At most four buffers of an app are "
            "shown, those that hold most; several buffers may share a tile.",
        ],
    )
    return drawn
