"""How full the executed tiles are with useful entries, by order and tile, for each workload; more is better."""

from tilewright.attention.blocks import tiles
from tilewright_study.experiments.attention import table_fill
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _select


def needs(config):
    """What the table of the same name needs."""
    return table_fill.needs(config)


def draw(inputs):
    """One panel per workload; slices and tiles of contiguous keys in ascending size, one bar per order."""
    frame = table_fill.table(inputs)
    models = list(dict.fromkeys(frame["model"]))
    orders = _palette.in_order(frame["reorder"], "orders")
    names = sorted(set(frame["tile"]), key=lambda name: (not tiles.parse(name).gathered, tiles.parse(name)))
    drawn = _style.figure(1.2 + 1.7 * len(models))
    width = 0.8 / len(orders)
    panels = drawn.subplots(len(models), 1, squeeze=False, sharex=True)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        rows = frame[frame["model"] == model]
        for place, order in enumerate(orders):
            here = rows[rows["reorder"] == order]
            x = [names.index(tile) + (place - (len(orders) - 1) / 2) * width for tile in here["tile"]]
            axes.bar(x, 100 * here["fill"], width, color=_palette.look(order, "orders").colour)
        density = 100 * rows["density"].iloc[0]
        axes.axhline(density, color=_style.INK, linewidth=1, linestyle="--")
        family = _palette.look(_select.family(model), "families").label
        axes.set_title(
            f"{family} {model.partition('-')[2]}: the mask allows {density:.1f} % of all pairs (dashed)", loc="left"
        )
        axes.set(ylim=(0, 100), ylabel="useful pairs (%)")
        axes.grid(axis="x", visible=False)
    panels[-1].set_xticks(range(len(names)), [name.replace("x", " × ") for name in names])
    panels[-1].set_xlabel("tile, queries × keys (× 1: keys gathered one by one)")
    _style.head(drawn, _finding(frame), _handles(orders))
    return drawn


def _finding(frame):
    """How much fuller the best order makes the tiles than the order of the model."""
    cells = frame.pivot_table(index=["model", "tile"], columns="reorder", values="fill")
    others = [order for order in cells if order != "none"]
    if "none" not in cells or not others:
        return "How full the executed tiles are"
    gain = (cells[others].max(axis=1) / cells["none"]).dropna()
    return f"Reordering makes executed tiles {_style.times(gain)} times as full"


def _handles(orders):
    from matplotlib.patches import Patch

    looks = [_palette.look(order, "orders") for order in orders]
    return [Patch(color=look.colour, label=look.label) for look in looks]
