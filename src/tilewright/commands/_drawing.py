"""A pattern and the tiles that execute it as pictures, in the style of the study's figures."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewright import graph
from tilewright.commands import style

if TYPE_CHECKING:
    from tilewright.attention.blocks import Blocks
    from tilewright.attention.plan import Plan

# Rows and columns of a picture; larger patterns are averaged down to them.
PIXELS = 640


@dataclass(frozen=True)
class Panel:
    """One picture. parts: ``[(tile's name, its Blocks, bool [blocks], those that are shown)]``."""

    title: str
    pattern: graph.Graph
    parts: list[tuple[str, "Blocks", np.ndarray]] = field(default_factory=list)

    @property
    def work(self) -> float:
        """Share of all pairs of query and key that is executed, padding of blocks included."""
        pairs = self.pattern.n_rows * self.pattern.n_cols
        return sum(int(cover.area[shown].sum()) for _, cover, shown in self.parts) / pairs


def of_plan(plan: "Plan") -> list[Panel]:
    """Panels of a plan: the pattern as the model has it, and in plan order with the blocks of its schedule."""
    s, parts = plan.schedule, []
    for t, name in enumerate(s.tiles):
        shown = np.zeros(plan.blocks[name].n_blocks, bool)
        shown[s.block[s.tile == t]] = True
        if shown.any():
            parts.append((name, plan.blocks[name], shown))
    order = f"plan order ({plan.reorder['order']})"
    return [Panel("as the model has it", natural(plan.graph)), Panel(order, plan.graph, parts)]


def of_pattern(found: graph.Graph, order: str, tile: str) -> list[Panel]:
    """Panels of a pattern: cut into blocks of `tile` as the model has it, and in `order`. Raises `TilewrightError`."""
    from tilewright.attention import blocks, reorder
    from tilewright.attention.blocks.tiles import parse

    if found.row_order is not None:
        pairs = {"as the file has it": found}
    else:
        pairs = {title: reorder.apply(found, name)[0] for title, name in _orders(order)}
    return [_cut(title, ordered, blocks.extract(ordered, parse(tile))) for title, ordered in pairs.items()]


def _orders(order):
    return [("as the model has it", "none"), *([(f"order {order}", order)] if order != "none" else [])]


def _cut(title, ordered, cover):
    name = cover.tile.name
    return Panel(f"{title}, tile {name}", ordered, [(name, cover, np.ones(cover.n_blocks, bool))])


def draw(panels: list[Panel], name: str, path: str | Path) -> None:
    """Draw `panels` side by side and write them to `path`."""
    with style.context():
        from matplotlib.patches import Patch

        drawn = style.figure(4.2 * len(panels) + 0.3, 5.2)
        used: dict = {}
        for axes, panel in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            colours = {tile: style.tint(style.tile_colour(tile), 0.55) for tile, _, _ in panel.parts}
            used |= colours
            shape = (0, panel.pattern.n_cols, panel.pattern.n_rows, 0)
            axes.imshow(picture(panel, colours), extent=shape, interpolation="antialiased", aspect="auto")
            axes.grid(False)
            axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
            for side in axes.spines.values():
                side.set(visible=True, color="#999999", linewidth=0.6)
            work = f"\nexecutes {panel.work:.1%} of all pairs" if panel.parts else "\n"
            axes.set_title(panel.title + work, fontsize=9.5)
        handles = [Patch(color=style.ENTRY, label="allowed pair")]
        handles += [Patch(color=colour, label=f"executed by {tile}, but masked") for tile, colour in used.items()]
        g = panels[0].pattern
        style.head(drawn, f"{name}: {g.n_rows:,} × {g.n_cols:,}, {g.entries:,} pairs, density {g.density:.3f}", handles)
        style.settle(drawn)
        style.save(drawn, path)


def picture(panel: Panel, colours: dict[str, style.Colour]) -> NDArray[np.float64]:
    """float [P, Q, 3]: white nothing, the tile's colour what is executed, dark the allowed pairs; means of pixels."""
    from matplotlib.colors import to_rgb

    shape = panel.pattern.shape
    step = [-(-size // PIXELS) for size in shape]
    sides = [np.bincount(np.arange(size) // by) for size, by in zip(shape, step, strict=True)]
    cells = np.multiply.outer(*sides)
    allowed = _allowed(panel.pattern, step, cells.shape) / cells
    shares = {tile: np.zeros(cells.shape) for tile, _, _ in panel.parts}
    for tile, cover, shown in panel.parts:
        shares[tile] += _executed(cover, shown, step, cells.shape) / cells
    total = np.clip(sum(shares.values(), np.zeros(cells.shape)), allowed, 1)
    entry, by_tile = np.array(to_rgb(style.ENTRY)), {tile: np.array(to_rgb(colours[tile])) for tile in shares}
    shade = np.ones((*cells.shape, 3)) * (1 - total)[..., None] + allowed[..., None] * entry
    # Of what is executed and masked, each tile its part.
    executed = sum(shares.values(), np.zeros(cells.shape))
    for tile, share in shares.items():
        part = np.divide(share, executed, out=np.zeros_like(share), where=executed > 0) * (total - allowed)
        shade += part[..., None] * by_tile[tile]
    return np.clip(shade, 0, 1)


def _allowed(pattern, step, shape):
    """Allowed pairs in each pixel."""
    # By distinct rows: patterns of many tokens share them.
    pixel = pattern.indices // step[1]
    of_rows = np.zeros((pattern.n_distinct, shape[1]), np.int32)
    np.add.at(of_rows, (pattern.entry_row_id, pixel), 1)
    found = np.zeros(shape, np.int64)
    np.add.at(found, np.arange(pattern.n_rows) // step[0], of_rows[pattern.row_id])
    return found


def _executed(cover, shown, step, shape):
    """Pairs of the blocks that are `shown` in each pixel."""
    found = np.zeros(shape, np.int64)
    for b in np.flatnonzero(shown):
        keys = cover.run_keys[cover.run_ptr[b] : cover.run_ptr[b + 1]]
        rows = np.bincount(np.arange(cover.row_ptr[b], cover.row_ptr[b + 1]) // step[0])
        begin = cover.row_ptr[b] // step[0]
        of_keys = np.bincount(keys[keys >= 0] // step[1], minlength=shape[1])
        found[begin : len(rows)] += np.multiply.outer(rows[begin:], of_keys)
    return found


def natural(ordered: graph.Graph) -> graph.Graph:
    """An ordered graph in the natural order; distinct rows stay shared."""
    assert ordered.row_order is not None and ordered.col_order is not None
    plain = replace(ordered, row_order=None, col_order=None)
    return plain.reordered(np.argsort(ordered.row_order), np.argsort(ordered.col_order))
