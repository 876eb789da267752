"""From how many tokens a window pays: one attention layer and one whole block of ViT-B, by tokens and density (stage
T5)."""

from typing import Annotated, Literal

import msgspec

from tilewright import devices
from tilewright.attention import backends, reorder
from tilewright.attention.schedule.search import NAMES as SOLVERS
from tilewright.attention.schedule.search import entered
from tilewright.core.errors import ConfigError
from tilewright_study import sections
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Flag, Number

TABLES = ("worth",)
FIGURES = ("worth",)

OURS = "tilewright"
AUTO = "auto"
PARTS = ("layer", "block")

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Values(sections.Section, frozen=True):
    """What all grids are run with.

    densities: shares of all pairs that the windows are chosen for, with a global token
    heads: of the layer
    head_dim: of the layer
    batch: images at a time
    order: the order of the plans; auto is that of tilewright.plan
    solver: the solver of the plans
    masked: what computes the same pattern, with the forms of each that are tried
    masked_densities: of densities, those that these are run for
    compiled: whether what a block does besides attention is compiled by torch.compile
    max_entries: a pattern with more pairs in its distinct rows is not run, and its row says so
    max_seconds: a timing stops after this time, in seconds
    """

    densities: tuple[float, ...]
    heads: Positive
    head_dim: Positive
    batch: Positive
    order: str
    solver: str
    masked: dict[str, tuple[str, ...]]
    masked_densities: tuple[float, ...]
    compiled: bool
    max_entries: Positive
    max_seconds: float

    def check_values(self, place):
        """Raise `ConfigError` for unknown names and for numbers out of range; place: what comes before their names."""
        sections.known(f"{place}order", "order", (self.order,), (AUTO, *reorder.NAMES))
        sections.known(f"{place}solver", "solver", (self.solver,), SOLVERS)
        for density in self.densities:
            if not 0 < density < 1:
                raise ConfigError(f"{place}densities: expected shares above 0 and below 1, found {density}")
        for density in self.masked_densities:
            if density not in self.densities:
                known = ", ".join(map(str, self.densities))
                raise ConfigError(
                    f"{place}masked_densities: expected some of the densities, found {density}; known: {known}"
                )
        sections.known(f"{place}masked", "baseline", self.masked, sparse_baselines.NAMES)
        if dense := [name for name in self.masked if name in sparse_baselines.DENSE]:
            raise ConfigError(
                f"{place}masked: expected baselines that compute the pattern, found {dense[0]}, which is dense"
            )


class Section(Values, frozen=True):
    """From how many tokens a window pays, by its density.

    grids: pairs of a side of the grid, in tokens, and of the squares of queries that share the window around them; 1
        is a window around each token
    """

    grids: tuple[tuple[Positive, Positive], ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        sections.distinct("worth.grids", [side for side, _ in self.grids])
        for side, square in self.grids:
            if side % square or side < 4:
                raise ConfigError(
                    f"worth.grids: expected at least 4 tokens a side, whole squares of {square}, found {side}"
                )
        sections.distinct("worth.densities", self.densities)
        self.check_values("worth.")
        sections.above_zero("worth.max_seconds", self.max_seconds)


class Settings(Values, frozen=True):
    """What one grid is run with. square: of its queries."""

    square: Positive


class Row(rows.Called, frozen=True, kw_only=True):
    """A provider in one part, on one grid and density.

    part: ``layer``, attention alone, or ``block``: norms, projections, attention and MLP; compiled: all of it but
    attention. side, square, window: of the grid, of the queries that share a window, and of that window, in tokens;
    asked, density: the share of all pairs that was asked for and the one that the window has, both 1 where all pairs
    are attended. Tokens are in plan order. reorder, solver, tiles, plan_s: of a plan, and the seconds that it took.
    relative_error: `reference.relative_error` of a layer; of a block's rows, by how far attention moves them.
    """

    kind: Literal["worth"] = "worth"
    version: Literal[1] = 1
    part: str = ""
    side: Count = None
    tokens: Count = None
    square: Count = None
    window: Count = None
    asked: Number = None
    density: Number = None
    provider: str = ""
    variant: str = ""
    compiled: Flag = None
    batch: Count = None
    heads: Count = None
    head_dim: Count = None
    reorder: str = ""
    solver: str = ""
    tiles: str = ""
    plan_s: Number = None


NAMED = "{part} of {tokens} tokens, density {asked}, {provider}"


def cases(config):
    """The sides of the grids."""
    return [str(side) for side, _ in config.worth.grids]


def settings(config, case):
    """`Settings` of one grid."""
    return sections.taken(Settings, config.worth, square=dict(config.worth.grids)[int(case)])


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    own = {"provider": OURS, "reorder": settings.order, "solver": settings.solver}
    return [own, *({"provider": name} for name in (*sparse_baselines.DENSE, *settings.masked))]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    made = ["tilewright.nn.patterns"]
    if row["provider"] in sparse_baselines.NAMES:
        return [*made, f"tilewright_study.baselines.sparse.{row['provider']}"]
    # A row that was skipped before anything was planned has no order.
    chosen = row.get("reorder") or AUTO
    orders = [name for name in reorder.NAMES if chosen in (AUTO, name)]
    return [
        *made,
        "tilewright.attention.plan",
        *(f"tilewright.attention.reorder.{name}" for name in orders),
        *entered(row.get("solver") or "greedy"),
        *devices.modules(device, *backends.PLANNING),
    ]


def size(case, settings):
    """Numbers that a case holds: the distinct rows of a pattern, or a dense mask."""
    tokens = 1 + int(case) ** 2
    entries = max(settings.densities, default=0) * tokens**2 / settings.square**2
    dense = tokens**2 // 8 if "sdpa_mask" in settings.masked else 0
    return int(min(settings.max_entries, entries)) + dense + 20 * tokens * settings.heads * settings.head_dim


def compiles(settings):
    """Whether a block or a baseline is compiled."""
    return settings.compiled or (bool(settings.masked_densities) and "flex" in settings.masked)


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['density']:.1%}, {rows.microseconds(row)}"
