"""How many keys lists have to keep for a share of attention, by shape of groups, order of tokens and chooser, and times
where all keep the same share (stage T5)."""

from typing import Literal

from tilewright.core.errors import ConfigError
from tilewright.study import sections
from tilewright.study.experiments import _rows, slices
from tilewright.study.experiments._rows import Count, Number, Status
from tilewright.study.experiments.slices import ORDERS, Predictors, sizes


class Section(sections.Section, frozen=True):
    """Keys that lists keep for a share of attention.

    shapes: pairs of heads and the dimension of a head
    grids: frames, rows and columns of a video's tokens
    joint: further cases, with tokens of text, as in slices
    orders: orders of the tokens; predictors choose, and times are taken, in the first one
    groups: shapes of groups, queries x keys listed together, for lists by the exact shares, 128x1 among them
    recalls: shares of attention that lists are to keep, on average over queries
    timed: that at which times are taken
    predictors: by a name of one's own, arguments of `slices.predict`, such as by and pool
    baselines: dense attention; flex, fa4 and flashinfer by the lists of those groups that are blocks of theirs
    max_seconds: a timing stops after this time, in seconds
    """

    shapes: tuple[tuple[int, int], ...]
    grids: tuple[tuple[int, int, int], ...]
    joint: tuple[str, ...]
    orders: tuple[str, ...]
    groups: tuple[str, ...]
    recalls: tuple[float, ...]
    timed: float
    predictors: Predictors
    baselines: tuple[str, ...]
    max_seconds: float

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        slices.check_maps("recall", self)
        sections.selection("recall.orders", self.orders)
        sections.known("recall.orders", "order of tokens", self.orders, ORDERS)
        sections.selection("recall.recalls", self.recalls)
        for recall in self.recalls:
            if not 0 < recall < 1:
                raise ConfigError(f"recall.recalls: expected shares between 0 and 1, found {recall}")
        if self.timed not in self.recalls:
            raise ConfigError(f"recall.timed: expected one of {', '.join(map(str, self.recalls))}, found {self.timed}")


class Settings(sections.Section, frozen=True):
    """What one case is run with; values as in `Section`."""

    orders: tuple[str, ...]
    groups: tuple[str, ...]
    recalls: tuple[float, ...]
    timed: float
    predictors: Predictors
    baselines: tuple[str, ...]
    max_seconds: float


class Row(_rows.Row, frozen=True, kw_only=True):
    """Lists that keep a share of attention, and attention by them.

    target: the share that was asked for; recall: that which the lists keep. provider, call: blank where no time was
    taken. The other columns are those of ``slices``.
    """

    kind: Literal["recall"] = "recall"
    version: Literal[1] = 1
    maps: str = ""
    heads: Count = None
    head_dim: Count = None
    grid: str = ""
    tokens: Count = None
    token_order: str = ""
    target: Number = None
    provider: str = ""
    call: str = ""
    group: str = ""
    chosen_by: str = ""
    keep: Number = None
    mass: Number = None
    status: Status = "ok"
    reason: str = ""
    dtype: str = ""
    density: Number = None
    least_density: Number = None
    most_density: Number = None
    recall: Number = None
    least_recall: Number = None
    l1_error: Number = None
    cosine: Number = None
    largest_error: Number = None
    error_bound: Number = None
    max_abs_error: Number = None
    relative_error: Number = None
    checked_rows: Count = None
    tolerance: Number = None
    p20_us: Number = None
    p50_us: Number = None
    p80_us: Number = None
    repetitions: Count = None
    rse: Number = None
    timing: str = ""
    latency_us: Number = None
    host_us: Number = None
    useful_gflops: Number = None


NAMED = "{chosen_by} {group}, {token_order}, recall {target} {provider}"
planned, modules, compiles, first_calls = slices.planned, slices.modules, slices.compiles, slices.first_calls


def cases(config):
    """Every shape on every grid."""
    return slices.case_names(config.recall)


def settings(config, case):
    """`Settings` of one case."""
    section = config.recall
    return Settings(**{name: getattr(section, name) for name in Settings.__struct_fields__})


def size(case, settings):
    """Numbers that a case holds, see `slices.size`."""
    return 4 * slices.size(case, settings)


def run(case, settings, how):
    """Yield the rows of `case`. Raises `TilewrightError`."""
    from tilewright.study.experiments import _slices

    heads, head_dim, grid = sizes(case)
    first, *_ = settings.orders
    stated = {"text": slices.text(case), "device": how.device, "dtype": how.dtype, "seed": how.seed}
    maps = _slices.Maps(heads, head_dim, grid, first, **stated)
    for order in settings.orders:
        maps.arrange(order)
        for target in settings.recalls:
            chosen = [maps.oracle_for(name, target) for name in settings.groups]
            if order == first:
                chosen += [maps.predicted_for(name, setting, target) for name, setting in settings.predictors.items()]
            if (order, target) == (first, settings.timed):
                effort = how.effort(settings.max_seconds)
                rows = _slices.rows_of(maps, _offers(_slices, maps, chosen, settings), effort)
            else:
                rows = [maps.known | lists.facts for lists in chosen]
            yield from (row | {"target": target} for row in rows)


def remark(row):
    """What the log says of a row that passed."""
    kept = f"{row['density']:.1%} of the keys"
    return f"{row['p50_us']:,.1f} us, {kept}" if "p50_us" in row else kept


def _offers(_slices, maps, chosen, settings):
    """The contenders that keep the same share of attention, for `_slices.rows_of`."""
    yield from slices.dense_offers(_slices, maps, settings)
    for lists in chosen:
        yield {"provider": _slices.OURS, **lists.facts}, lambda lists=lists: [_slices.ours(maps, lists)]
    yield from slices.block_offers(_slices, maps, chosen, settings)
