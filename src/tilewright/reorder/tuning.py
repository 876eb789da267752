"""Settings that a user leaves open are chosen on the graph itself (stage T2)."""

from dataclasses import replace

import msgspec
import numpy as np
from tqdm import tqdm

from tilewright.errors import ConfigError
from tilewright.reorder.axes import WIDE

# Distinct rows on which settings are tried; a larger graph is tuned on as many that lie together.
TUNE_ROWS = 4096
# Steps of one trial: sampled clustering is good enough to compare settings.
TUNE_BUDGET = 2e8


def resolve(name, params, published, grid, arrange):
    """The settings of `params` for its variant, as a dict without None where the variant has a value.

    ``variant: paper`` takes what is left open from `published`; the default variant tunes it over `grid`, a dict of
    tuples, by ``arrange(settings) -> score``, one setting after the other, the first value of each to begin with.
    Raises `ConfigError` for a setting of the other variant.
    """
    given = {key: value for key, value in msgspec.to_builtins(params).items() if value is not None}
    given = {key: value for key, value in given.items() if key not in ("variant", "symmetric")}
    known = published if params.variant == "paper" else grid
    if foreign := given.keys() - known.keys():
        raise ConfigError(
            f"order {name}: variant {params.variant} has no setting {', '.join(sorted(foreign))}; "
            f"known: {', '.join(known)}"
        )
    if params.variant == "paper":
        return {**published, **given}
    used = {key: values[0] for key, values in grid.items()} | given
    free = {key: values for key, values in grid.items() if key not in given and len(values) > 1}
    best = arrange(used) if free else None
    trials = [(key, value) for key, values in free.items() for value in values[1:]]
    # disable=None: shown on a terminal only.
    for key, value in tqdm(trials, desc=f"tuning {name}", disable=None, leave=False):
        score = arrange({**used, key: value})
        if score < best:
            best, used = score, {**used, key: value}
    return used


def sample(graph):
    """`graph`, or a part of at most `TUNE_ROWS` distinct rows that lie together, wide ones left out."""
    from tilewright.reorder.growth import grow
    from tilewright.reorder.quotient import quotient

    if graph.n_classes <= TUNE_ROWS:
        return graph
    degree = np.diff(graph.indptr)
    rows = np.flatnonzero((degree > 0) & (degree <= WIDE * np.median(graph.row_degree)))
    if len(rows) <= TUNE_ROWS:
        return graph
    q = quotient(graph, rows)
    chosen = np.zeros(graph.n_classes, bool)
    chosen[q.rows[grow(q, cap=64, tau=1.0, limit=TUNE_ROWS)]] = True
    return replace(graph, row_class=graph.row_class[chosen[graph.row_class]], row_hint=None, col_hint=None)


def score(graph, row_order):
    """What settings are compared by: work of fixed groups of 64 (as published) times that of the best cut (as run)."""
    from tilewright.reorder.quality import work_fraction

    return work_fraction(graph, row_order) * work_fraction(graph, row_order, best_cut=True)
