"""Settings that a user leaves open are chosen on the graph itself (stage T2)."""

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tilewright.attention.reorder._axes import WIDE
from tilewright.core import progress

if TYPE_CHECKING:
    from tilewright.graph import Graph

# Distinct rows on which settings are tried; a larger graph is tuned on as many that lie together. On patterns of 16,384
# rows without a grid, the best cut gathers between 8 % less and 5 % more than with settings tuned on the whole, which
# takes three to eight times as long.
TUNE_ROWS = 2048


def check(params, published: dict, grid: dict) -> None:
    """Raise ValueError (which `msgspec.convert` reports) for a setting of the other variant of `params`."""
    known = [*published] if params.variant == "paper" else [*grid, "grid"]
    if foreign := _given(params).keys() - set(known):
        raise ValueError(
            f"variant {params.variant} has no setting {', '.join(sorted(foreign))}, it has {', '.join(known)}"
        )


def settle(params, published, grid) -> tuple[dict[str, float], dict[str, tuple]]:
    """``(used, free)``: the settings of the variant of `params` as a dict, and those left to tune with their values.

    ``variant: paper`` takes what is left open from `published` and tunes nothing; the default variant takes the first
    value of `grid`, a dict of tuples.
    """
    given = {key: value for key, value in _given(params).items() if key != "grid"}
    if params.variant == "paper":
        return {**published, **given}, {}
    free = {key: values for key, values in grid.items() if key not in given and len(values) > 1}
    return {key: values[0] for key, values in grid.items()} | given, free


def on_grid(graph: "Graph", params):
    """``(row_order, settings)`` by the grid of a pattern (see `_grid.order`), or None.

    None where the pattern has no grid, and where `params` asks for the procedure by its settings.
    """
    from tilewright.attention.reorder import _grid

    wanted = params.variant == "default" and (not _given(params) if params.grid is None else params.grid)
    found = _grid.order(graph) if wanted else None
    return found and (found[0], {"grid": True, **found[1]})


def _given(params):
    settings = msgspec.to_builtins(params)
    return {k: v for k, v in settings.items() if v is not None and k not in ("variant", "symmetric")}


def tuned(name: str, graph: "Graph", used, free, arrange):
    """``(row_order, used)`` after trying the values of `free` one setting after the other, each time keeping the best.

    ``arrange(graph, settings) -> row_order``.
    """
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
