"""The true attention mask of a layer before and after each order, with its blocks.

The attention mask of one layer before ("as the model has it") and after each order. Dark: pairs that the mask allows.
Pale: pairs that the tile executes besides, masked. Boxes: the stretches of keys that a block executes, drawn where they
do not hide the pattern. The percentage is the executed area, padding included, over that of dense attention.
"""

import numpy as np

from tilewright.commands.style import ENTRY
from tilewright.core.errors import ArtifactError
from tilewright_study.figures import _palette, _style
from tilewright_study.tables import _read, _select

EXECUTED = "#FBD5A5"
# Of a block's edges, and the median side of blocks, in pixels, from which edges show them rather than hide the pattern.
OUTLINE, LEAST_OUTLINE = "#C05000", 10
COLUMNS = 3
# Side of a picture in pixels; larger patterns are averaged down, so that a lone entry stays visible as a shade.
PIXELS = 800


def needs(config, family):
    """Reordered graphs and blocks of the first workload of `family` in ``config.figures.pattern_workloads``."""
    models = _select.of_family(_select.drawn(config, config.figures.pattern_workloads), family)[:1]
    graphs = [f"results/graphs/{m}/{r}.npz" for m in models for r in config.orders]
    return graphs + _select.blocks(config, models, config.figures.pattern_tiles)


def draw(inputs, family):
    """Pictures of one workload of `family`: its orders side by side, one tile after the other.

    Raises `ArtifactError` for blocks whose graph is not that of their order.
    """
    from tilewright import graph
    from tilewright.attention import blocks

    files = _read.by_kind(inputs, graph=graph.load, blocks=blocks.load)
    graphs = {path.stem: pattern for path, pattern in files["graph"].items()}
    pictures = []
    for path, cover in files["blocks"].items():
        order = path.parent.name
        if order not in graphs or graphs[order].id != cover.graph_id:
            raise ArtifactError(f"{path}: expected blocks of a graph among the inputs, found those of {cover.graph_id}")
        pictures.append((cover.tile.name, order, cover))
    tiles = list(dict.fromkeys(tile for tile, _, _ in pictures))
    orders = _palette.in_order(graphs, "orders")
    columns = min(COLUMNS, len(orders))
    rows = -(-len(orders) // columns)
    drawn = _style.figure((2.65 * rows * len(tiles)) + 0.9)
    panels = drawn.subplots(rows * len(tiles), columns, squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for tile, order, cover in pictures:
        row, column = divmod(orders.index(order), columns)
        _picture(panels[tiles.index(tile) * rows + row, column], order, graphs[order], cover)
    executed = {order: work(cover) for tile, order, cover in pictures if tile == tiles[0]}
    finding, spare = _finding(family, executed, next(iter(graphs.values())).density), rows * columns - len(orders)
    if spare:
        panels[-1, -1].legend(handles=_handles(), loc="center", fontsize=_style.LETTERS)
    _style.head(drawn, finding, () if spare else _handles())
    (tokens,) = {pattern.n_rows for pattern in graphs.values()}
    _style.notes(
        drawn,
        f"{tokens:,} tokens; queries run down, keys to the right. Percentages: pairs that the tile executes, padding "
        "included, of all. Boxes are left out where they would hide the mask.",
    )
    return drawn


def _finding(family, executed, density):
    """What reordering leaves to execute, where it was measured."""
    said = f"{_style.layer_name(family)}: the mask allows {density:.1%} of all pairs"
    others = [share for order, share in executed.items() if order != "none"]
    if "none" not in executed or not others:
        return said
    natural, least = executed["none"], min(others)
    # Orders of a mask that is dense in any of them differ by their padding alone.
    return f"{said}; tiles run {natural:.1%}, {f'reordered {least:.1%}' if least < 0.99 * natural else 'in any order'}"


def work(cover):
    """Pairs that the blocks execute, padding included, over all."""
    return cover.area.sum() / (cover.shape[0] * cover.shape[1])


def picture(pattern, cover):
    """float [P, P, 3]: white nothing, pale orange executed, dark blue the entries, averaged to pixels.

    cover: the blocks whose pairs are executed, or None.
    """
    from matplotlib.colors import to_rgb

    shades = np.array([to_rgb("white"), to_rgb(EXECUTED), to_rgb(ENTRY)], np.float32)
    executed = np.zeros(pattern.shape, bool) if cover is None else _executed(cover)
    levels = np.where(pattern.to_dense(), 2, executed.astype(np.int8))
    step = [-(-size // PIXELS) for size in levels.shape]
    starts = [np.arange(0, size, by) for size, by in zip(levels.shape, step, strict=True)]
    cells = np.multiply.outer(*(np.diff([*s, n]) for s, n in zip(starts, levels.shape, strict=True)))
    total = np.zeros((*cells.shape, 3), np.float32)
    for level, shade in enumerate(shades):
        count = np.add.reduceat(np.add.reduceat(levels == level, starts[0], 0, np.int32), starts[1], 1)
        total += (count / cells)[:, :, None] * shade
    return total


def _executed(cover):
    """bool [N_q, N_k]: pairs inside some block."""
    executed = np.zeros(cover.shape, bool)
    for b in range(cover.n_blocks):
        keys = cover.run_keys[cover.run_ptr[b] : cover.run_ptr[b + 1]]
        executed[cover.row_ptr[b] : cover.row_ptr[b + 1], keys[keys >= 0]] = True
    return executed


def _picture(axes, order, pattern, cover):
    axes.set_axis_on()
    shape = (0, pattern.n_cols, pattern.n_rows, 0)
    axes.imshow(picture(pattern, cover), extent=shape, interpolation="antialiased", aspect="auto")
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(visible=True, color="#999999", linewidth=0.6)
    outline(axes, stretches(cover), PIXELS / max(pattern.shape))
    name = "the model's order" if order == "none" else f"order {_style.order_name(order)}"
    axes.set_title(f"{name}: {work(cover):.1%}\ntile {cover.tile.name.replace('x', ' × ')}", loc="left")


def _handles():
    from matplotlib.patches import Patch

    return [
        Patch(color=ENTRY, label="allowed pair"),
        Patch(color=EXECUTED, label="executed, but masked"),
        Patch(facecolor="none", edgecolor=OUTLINE, label="block"),
    ]


def stretches(cover):
    """int [S, 4], ``(top, bottom, left, right)``: the keys of each block, consecutive ones as one stretch.

    A tile of contiguous keys has one stretch for each of its runs.
    """
    if not cover.tile.gathered:
        block = np.repeat(np.arange(cover.n_blocks), cover.runs)
        edges = cover.row_ptr[block], cover.row_ptr[block + 1], cover.run_keys[:, 0], cover.run_keys.max(axis=1) + 1
        return np.stack(edges, axis=1)
    found = []
    for b in range(cover.n_blocks):
        keys = cover.run_keys[cover.run_ptr[b] : cover.run_ptr[b + 1]].reshape(-1)
        keys = np.sort(keys[keys >= 0])
        cuts = np.flatnonzero(np.diff(keys) > 1)
        left, right = keys[np.r_[0, cuts + 1]] if len(keys) else keys, np.r_[keys[cuts], keys[-1:]] + 1
        found.append(
            np.stack([np.full(len(left), cover.row_ptr[b]), np.full(len(left), cover.row_ptr[b + 1]), left, right], 1)
        )
    return np.concatenate(found)


def outline(axes, boxes, pixels) -> None:
    """Draw the edges of `boxes`, as `stretches` has them, where they are so large that edges do not hide the mask."""
    from matplotlib.collections import PolyCollection

    top, bottom, left, right = boxes.T
    if min(np.median(bottom - top), np.median(right - left)) * pixels < LEAST_OUTLINE:
        return
    corners = np.stack([[left, top], [right, top], [right, bottom], [left, bottom]]).transpose(2, 0, 1)
    axes.add_collection(PolyCollection(list(corners), facecolors="none", edgecolors=OUTLINE, linewidths=0.5))
