"""Settings that a user leaves open are chosen on the graph itself (stage T2)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tilewright.attention.reorder._axes import WIDE, key_order
from tilewright.core import caches, progress

if TYPE_CHECKING:
    from tilewright.graph import Graph

Settings = Mapping[str, Any]
Grid = Mapping[str, tuple]
# ``call(graph, settings) -> row_order``.
Arrange = Callable[["Graph", Settings], NDArray[np.int32]]
# Distinct rows on which settings are tried; a larger graph is tuned on as many that lie together. On patterns of 16,384
# rows without a grid, the best cut gathers between 8 % less and 5 % more than with settings tuned on the whole, which
# takes three to eight times as long.
TUNE_ROWS = 2048
# Of the last graph, what `on_grid` returned.
_GRIDS = caches.Recent(1)


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that both clusterings have; None is tuned."""

    symmetric: bool | None = None
    col_block: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cap: Annotated[int, msgspec.Meta(ge=1)] | None = None
    wide: Annotated[float, msgspec.Meta(ge=1)] | None = None
    grid: bool | None = None


def order(
    name: str, graph: "Graph", params: Params, grid: Grid, arrange: Arrange
) -> tuple[NDArray[np.int32], NDArray[np.int32], Settings]:
    """What the module `name` returns for `params` (see `tilewright.attention.reorder`).

    grid: the values that are tried of what is left open, the first of which stands else. arrange: the procedure. Where
    the pattern has a grid, that decides (see `_grid.order`), unless `params` asks for the procedure by its settings.
    """
    stated = msgspec.structs.asdict(params)
    given = {key: stated[key] for key in grid if stated[key] is not None}
    found = on_grid(graph) if (not given if params.grid is None else params.grid) else None
    if found is not None:
        rows, used = found[0], {"grid": True, **found[1]}
    else:
        free = {key: values for key, values in grid.items() if key not in given and len(values) > 1}
        rows, used = _tuned(name, graph, {key: values[0] for key, values in grid.items()} | given, free, arrange)
    cols, symmetric = key_order(graph, rows, params.symmetric)
    return rows, cols, {**used, "symmetric": symmetric}


def on_grid(graph: "Graph") -> tuple[NDArray[np.int32], Settings] | None:
    """As `_grid.order`: remembered, since both clusterings ask."""
    for known in _GRIDS.get(graph.id):
        return known
    # Here: it takes long to load.
    from tilewright.attention.reorder import _grid

    found = _grid.order(graph)
    _GRIDS.add(graph.id, found)
    return found


def _tuned(name, graph, used, free, arrange):
    """``(row_order, used)`` after trying the values of `free` one setting after the other, each time keeping the best.

    ``arrange(graph, settings) -> row_order``.
    """
    if graph.n_distinct == 1:
        # Equal rows stay as they are, whatever is set.
        return np.arange(graph.n_rows, dtype=np.int32), used
    if "wide" in free:
        free = {**free, "wide": _distinct_wide(graph, free["wide"])}
    trials = [(key, value) for key, values in free.items() for value in values[1:]]
    if not trials:
        return arrange(graph, used), used
    part = _sample(graph)
    rows = arrange(part, used)
    best = _score(part, rows)
    for key, value in progress.with_progress(trials, f"tuning {name}"):
        other = arrange(part, {**used, key: value})
        if (score := _score(part, other)) < best:
            best, rows, used = score, other, {**used, key: value}
    return (rows if part is graph else arrange(graph, used)), used


def _score(graph, row_order):
    """What settings are compared by: the work of fixed groups of 64, as published, times that of the best cut, as run.

    Either alone is blind: the former to clusters that end within a group, the latter to groups that are not filled.
    """
    from tilewright.attention.reorder._quality import work_fraction

    return work_fraction(graph, row_order) * work_fraction(graph, row_order, best_cut=True)


def _distinct_wide(graph, values):
    """Of the multiples `values` of the median, one for each number of rows that they set apart."""
    degree, median = np.diff(graph.indptr), np.median(graph.row_degree)
    found: dict = {}
    for value in values:
        found.setdefault(int((degree > value * median).sum()), value)
    return tuple(found.values())


def _sample(graph):
    """`graph`, or a part of at most `TUNE_ROWS` distinct rows that lie together, wide ones left out."""
    from tilewright.attention.reorder._growth import grow
    from tilewright.attention.reorder._quotient import quotient

    degree = np.diff(graph.indptr)
    rows = np.flatnonzero((degree > 0) & (degree <= WIDE * np.median(graph.row_degree)))
    if graph.n_distinct <= TUNE_ROWS or len(rows) <= TUNE_ROWS:
        return graph
    q = quotient(graph, rows)
    chosen = np.zeros(graph.n_distinct, bool)
    chosen[q.rows[grow(q, cap=64, tau=1.0, limit=TUNE_ROWS)]] = True
    return replace(graph, row_id=graph.row_id[chosen[graph.row_id]], row_hint=None, col_hint=None)
