"""What the experiment `recall` measures: lists that keep a share of attention, and what they cost."""

from tilewright.core.errors import Unavailable
from tilewright_study.experiments.recall import shape
from tilewright_study.experiments.slices import text
from tilewright_study.experiments.slices.run import (
    OURS,
    Maps,
    block_offers,
    compile_flex,
    dense_offers,
    ours,
    rows_of,
)
from tilewright_study.measure import weights


def run(case, settings, how):
    """Yield the rows of `case`; of weights that are not there one row, which says so. Raises `TilewrightError`."""
    heads, head_dim, grid = shape(case, settings)
    first, *_ = settings.orders
    stated = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    if settings.weights is None:
        maps = Maps(heads, head_dim, grid, first, text=text(case), **stated)
        yield from _rows_of(maps, settings, how)
        return
    for noise in settings.noise:
        try:
            maps = weights.maps(settings.weights, settings.layers, noise, grid, first, **stated)
        except Unavailable as reason:
            yield weights.absent(settings.weights, grid, reason, how)
            return
        yield from _rows_of(maps, settings, how)


def first_calls(case, settings, how):
    """Compile FlexAttention for the shape of a case."""
    yield from compile_flex(*shape(case, settings), device=how.device, dtype=how.dtype)


def _rows_of(maps, settings, how):
    """The rows of maps from one source."""
    first, *_ = settings.orders
    for order in settings.orders:
        if order != maps.order:
            maps.arrange(order)
        for target in settings.recalls:
            chosen = [maps.oracle_for(name, target) for name in settings.groups]
            if order == first:
                chosen += [maps.predicted_for(name, setting, target) for name, setting in settings.predictors.items()]
            if (order, target) == (first, settings.timed):
                effort = how.effort(settings.max_seconds)
                rows = rows_of(maps, _offers(maps, chosen, settings), effort)
            else:
                rows = [maps.known | lists.columns for lists in chosen]
            yield from (row | {"target": target} for row in rows)


def _offers(maps, chosen, settings):
    """The contenders that keep the same share of attention, for `rows_of`."""
    yield from dense_offers(maps, settings)
    for lists in chosen:
        yield {"provider": OURS, **lists.facts}, lambda lists=lists: [ours(maps, lists)]
    yield from block_offers(maps, chosen, settings)
