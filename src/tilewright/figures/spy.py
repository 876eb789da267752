"""Masks as pictures: each entry of the pattern dark, what a tile executes besides it pale, blocks outlined.

One column per order (``none`` is the pattern as the model has it), one row per tile.
"""

import numpy as np

from tilewright.errors import ArtifactError
from tilewright.figures import style
from tilewright.tables import read, select

# Side of a picture in pixels; larger patterns are averaged down, so that a lone entry stays visible as a shade.
PIXELS = 640
# Outlines closer than this many pixels would hide the pattern.
_LEAST_BLOCK = 9


def needs(config, family):
    """Reordered graphs and blocks of the first workload of `family` in ``config.figures.pattern_workloads``."""
    models = select.of_family(config.figures.pattern_workloads, family)[:1]
    graphs = [f"results/graphs/{m}/{r}.npz" for m in models for r in config.orders]
    return graphs + select.blocks(config, models, config.figures.pattern_tiles)


def draw(inputs):
    """A grid of pictures, tiles by orders, from reordered graphs and blocks of one workload.

    Raises `ArtifactError` for blocks of a graph that is not among the inputs.
    """
    from tilewright import blocks, graph

    files = read.by_kind(inputs, graph=graph.load, blocks=blocks.load)
    graphs = {pattern.id: (path.stem, pattern) for path, pattern in files["graph"].items()}
    covers = {}
    for path, cover in files["blocks"].items():
        if cover.graph_id not in graphs:
            raise ArtifactError(f"{path}: expected blocks of a graph among the inputs, found those of {cover.graph_id}")
        covers[graphs[cover.graph_id][0], cover.tile.name] = cover
    orders = style.ordered(name for name, _ in graphs.values())
    tiles = list(dict.fromkeys(tile for _, tile in covers))
    drawn = style.figure(2.45 * len(orders) + 0.5, 2.55 * len(tiles) + 1.1)
    panels = drawn.subplots(len(tiles), len(orders), squeeze=False)
    for order, pattern in graphs.values():
        for row, tile in enumerate(tiles):
            axes = panels[row, orders.index(order)]
            if (order, tile) not in covers:
                style.nothing(axes, "no blocks given")
                continue
            _picture(axes, pattern, covers[order, tile])
            if row == 0:
                axes.set_title("as the model has it" if order == "none" else style.order_name(order), pad=16)
    for axes, tile in zip(panels[:, 0], tiles, strict=True):
        axes.set_ylabel(f"tile {tile}\nqueries", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("keys", fontsize=9)
    some = next(iter(files["graph"]))
    pattern = files["graph"][some]
    facts = f"{pattern.n_rows:,} tokens, {pattern.entries:,} entries, density {pattern.density:.3f}"
    style.head(drawn, f"{some.parent.name}: {facts}", _handles())
    style.notes(
        drawn,
        [
            "Percentages: share of the dense N × N pairs that the tile executes, padding included. A tile of contiguous "
            "keys is outlined block by block; a slice (Mx1) gathers its keys one by one, so lines only separate its "
            "blocks of rows. Outlines are left out where they would hide the pattern."
        ],
        width=int(30 * len(orders)),
    )
    return drawn


def _picture(axes, pattern, cover):
    axes.imshow(
        picture(pattern, cover),
        extent=(0, pattern.n_cols, pattern.n_rows, 0),
        interpolation="antialiased",
        aspect="auto",
    )
    axes.grid(False)
    for side in axes.spines.values():
        side.set(visible=True, color="#999999", linewidth=0.6)
    axes.set(xticks=[], yticks=[])
    _outline(axes, pattern, cover)
    work = cover.area.sum() / (pattern.n_rows * pattern.n_cols)
    axes.text(0, 1.015, f"executes {work:.1%} of dense", transform=axes.transAxes, fontsize=7.5, color="#444444")


def picture(pattern, cover):
    """float [P, P, 3]: white nothing, pale orange executed, dark blue the entries, averaged to pixels."""
    from matplotlib.colors import to_rgb

    executed = np.zeros(pattern.shape, bool)
    for b in range(cover.n_blocks):
        keys = cover.run_keys[cover.run_ptr[b] : cover.run_ptr[b + 1]]
        executed[cover.row_ptr[b] : cover.row_ptr[b + 1], keys[keys >= 0]] = True
    entries = pattern.to_dense()
    shades = np.array([to_rgb("white"), to_rgb(EXECUTED), to_rgb(ENTRY)], np.float32)
    levels = np.where(entries, 2, executed.astype(np.int8))
    return _average(shades, levels)


EXECUTED, ENTRY, OUTLINE = "#FBD5A5", "#08306B", "#C05000"


def _average(shades, levels):
    """Mean colour over equal cells, so that nothing is lost by skipping rows or columns."""
    step = [-(-size // PIXELS) for size in levels.shape]
    starts = [np.arange(0, size, by) for size, by in zip(levels.shape, step, strict=True)]
    count = np.add.reduceat(np.add.reduceat(np.ones(levels.shape, np.float32), starts[0], 0), starts[1], 1)
    total = 0
    for level, shade in enumerate(shades):
        share = np.add.reduceat(np.add.reduceat((levels == level).astype(np.float32), starts[0], 0), starts[1], 1)
        total = total + (share / count)[:, :, None] * shade
    return total


def _outline(axes, pattern, cover):
    from matplotlib.collections import LineCollection, PolyCollection

    pixels = PIXELS / max(pattern.shape)
    if cover.tile.rows * pixels < _LEAST_BLOCK:
        return
    if cover.tile.gathered:
        edges = cover.row_ptr[1:-1]
        axes.add_collection(
            LineCollection([[(0, y), (pattern.n_cols, y)] for y in edges], colors=OUTLINE, linewidths=0.4)
        )
        return
    block = np.repeat(np.arange(cover.n_blocks), cover.runs)
    top, bottom = cover.row_ptr[block], cover.row_ptr[block + 1]
    left, right = cover.run_keys[:, 0], cover.run_keys.max(axis=1) + 1
    corners = np.stack([[left, top], [right, top], [right, bottom], [left, bottom]]).transpose(2, 0, 1)
    axes.add_collection(PolyCollection(corners, facecolors="none", edgecolors=OUTLINE, linewidths=0.4))


def _handles():
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=ENTRY, label="allowed pair"),
        Patch(color=EXECUTED, label="executed by the tile, masked"),
        Line2D([], [], color=OUTLINE, linewidth=1, label="block"),
    ]
