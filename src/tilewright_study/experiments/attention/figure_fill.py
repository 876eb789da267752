"""How full the executed tiles are with useful entries, by order and tile, for each workload; more is better."""

from tilewright.attention.blocks import tiles
from tilewright_study.experiments.attention import table_fill
from tilewright_study.figures import _style


def needs(config):
    """What the table of the same name needs."""
    return table_fill.needs(config)


def draw(inputs):
    """One panel per workload; slices and tiles of contiguous keys in ascending size, one bar per order."""
    frame = table_fill.table(inputs)
    models = list(dict.fromkeys(frame["model"]))
    orders = _style.sorted_orders(frame["reorder"])
    names = sorted(set(frame["tile"]), key=lambda name: (not tiles.parse(name).gathered, tiles.parse(name)))
    drawn = _style.figure(1.2 + 1.15 * len(names), 2.55 * len(models) + 1.0)
    width = 0.8 / len(orders)
    panels = drawn.subplots(len(models), 1, squeeze=False, sharex=True)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        rows = frame[frame["model"] == model]
        for place, order in enumerate(orders):
            here = rows[rows["reorder"] == order]
            x = [names.index(tile) + (place - (len(orders) - 1) / 2) * width for tile in here["tile"]]
            axes.bar(x, here["fill"], width, color=_style.order_colour(order, orders), label=_style.order_name(order))
        axes.axhline(
            rows["density"].iloc[0], color=_style.INK, linewidth=1, linestyle="--", label="density of the pattern"
        )
        axes.set_title(f"{model} (density {rows['density'].iloc[0]:.3f})", loc="left")
        axes.set(ylim=(0, 1), ylabel="fill")
        axes.grid(axis="x", visible=False)
    panels[-1].set_xticks(range(len(names)), names)
    panels[-1].set_xlabel("tile (queries × keys; ×1: keys gathered one by one)")
    line, *bars = panels[0].get_legend_handles_labels()[0]
    _style.head(drawn, "How full the executed tiles are", [*bars, line])
    _style.notes(drawn, ["Fill: allowed pairs over pairs executed, padding of rows and keys included."])
    return drawn
