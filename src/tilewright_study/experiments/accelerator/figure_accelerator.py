"""Paths on generated hardware, by a cost model: energy against cycles over the whole network's, what vectors of other
widths leave of the savings, and energy times delay times area by the size of the hardware."""

from tilewright_study.experiments.accelerator import table_accelerator
from tilewright_study.figures import _contenders, _style

COLOURS = ("#5A5A5A", "#D55E00", "#E69F00", _contenders.BLUE, "#009E73", "#CC79A7", "#56B4E9", "#882255")
# Paths of the panel by size: more would hide each other.
_BY_SIZE = 2


def needs(config):
    """What the table of the same name needs."""
    return table_accelerator.needs(config)


def draw(inputs):
    """A row of panels per network."""
    frame = table_accelerator.table(inputs)
    cases = list(frame.groupby("network", sort=False))
    drawn = _style.figure(11.2, 1.5 + 3.7 * len(cases))
    grid = drawn.add_gridspec(len(cases), 3)
    for line, (network, rows) in enumerate(cases):
        costs = rows.dropna(subset="energy_over")
        if not len(costs):
            _style.nothing(drawn.add_subplot(grid[line, :]), f"{network}: {rows['reason'].iloc[0]}")
            continue
        panels = [drawn.add_subplot(grid[line, column]) for column in range(3)]
        paths = list(dict.fromkeys(costs["path"]))
        colours = dict(zip(paths, COLOURS * (1 + len(paths) // len(COLOURS)), strict=False))
        for path, own in costs.groupby("path", sort=False):
            style = {"color": colours[path], "label": path}
            panels[0].scatter(own["cycles_over"], own["energy_over"], s=14, alpha=0.8, **style)
            by_vector = own.groupby("vector")["energy_over"]
            _band(panels[1], by_vector, style)
            if path in paths[:_BY_SIZE]:
                least = own.assign(relative=own["product_least"]).sort_values("area")
                panels[2].plot(least["area"], least["relative"], linestyle="", marker="o", markersize=3.5, **style)
        panels[0].set(xscale="log", yscale="log")
        panels[0].set(xlabel="cycles, × the whole path's", ylabel="energy, × the whole path's")
        panels[0].set_title(f"{network}: all hardware", loc="left")
        vectors = sorted(set(costs["vector"]))
        panels[1].set(
            xscale="log", yscale="log", xlabel="input channels of a vector", ylabel="energy, × the whole path's"
        )
        panels[1].set_xticks(vectors, [f"{each:.0f}" for each in vectors])
        panels[1].minorticks_off()
        panels[1].set_title("by vector: median, least and most", loc="left")
        panels[2].set(xscale="log", yscale="log", xlabel="area, × the smallest hardware's")
        panels[2].set_ylabel("energy × delay × area,\n× the best hardware's")
        panels[2].set_title("by size", loc="left")
        for axis in (panels[0].xaxis, panels[0].yaxis, panels[1].yaxis, panels[2].xaxis, panels[2].yaxis):
            _style.plain_ticks(axis)
        panels[0].legend(fontsize=6.5, loc="upper left")
    _style.head(drawn, "Paths on generated hardware: a cost model, uncalibrated")
    costs = frame.dropna(subset="energy_over")
    if not len(costs):
        return drawn
    recorded = sorted(set(frame.loc[frame["origin"] == "recorded", "reason"]) - {""})
    _style.notes(
        drawn,
        [
            f"{', '.join(sorted(set(frame['device'])))}; {costs['hardware'].nunique()} kinds of hardware, "
            "8-bit products, 24-bit sums. Only ratios are claimed: no chip was made, and the paper's silicon is not "
            "compared with. Norms, softmax, activations, sums and resizing are left out; they read and write "
            f"{costs['left_out_mb'].min():,.0f} to {costs['left_out_mb'].max():,.0f} MB an image.",
            *[f"Recorded costs are shown: {reason}." for reason in recorded],
        ],
    )
    return drawn


def _band(axes, grouped, style):
    middle, least, most = grouped.median(), grouped.min(), grouped.max()
    axes.plot(middle.index, middle, marker="o", markersize=3.5, **style)
    axes.fill_between(middle.index, least, most, color=style["color"], alpha=0.12, linewidth=0)
