"""Budgets of slices for each head: the error of attention or of a network at equal time, by who chooses (stage T5)."""

from typing import Literal

from tilewright import devices, networks
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.slices.budgets import choice
from tilewright_study import sections
from tilewright_study.experiments import slices
from tilewright_study.experiments.slices import ORDERS, sizes
from tilewright_study.measure import rows
from tilewright_study.measure import weights as _weights
from tilewright_study.measure.rows import Count, Number

TABLES = ("budgets",)
FIGURES = ("budgets",)

# Beside the choosers: all keys, and lists of as many keys in all by one mass of attention for all heads.
DENSE, MASS = "dense", "mass"


class Values(sections.Section, frozen=True):
    """What all cases have in common.

    order: of the tokens
    shares: of the keys, that heads choose among
    keeps: shares of the keys, for all heads alike, whose time is allowed
    choosers: of tilewright.slices.budgets.choice, single only in the time of one of the shares, or mass, one mass of
        attention for all heads
    steps: of a run of a network
    parts: of a run, each with budgets of its own
    rows: queries of a group
    max_seconds: a timing stops after this time, in seconds
    """

    order: str
    shares: tuple[float, ...]
    keeps: tuple[float, ...]
    choosers: tuple[str, ...]
    steps: int
    parts: int
    rows: int
    max_seconds: float


class Section(Values, frozen=True):
    """Budgets of slices for each head.

    shapes: pairs of heads and the dimension of a head, for planted maps of mixed kinds
    grids: frames, rows and columns of a video's tokens, for planted maps
    networks: grids for networks, by the name that their weights have in video.weights
    """

    shapes: tuple[tuple[int, int], ...]
    grids: tuple[tuple[int, int, int], ...]
    networks: dict[str, tuple[tuple[int, int, int], ...]]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        for name in ("shapes", "grids"):
            values = getattr(self, name)
            sections.distinct(f"budgets.{name}", values)
            sections.at_least(f"budgets.{name}", 1, [number for one in values for number in one])
        weights = {} if config.video is None else config.video.weights
        sections.known("budgets.networks", "weights of video.weights", self.networks, weights)
        for name, grids in self.networks.items():
            sections.at_least(f"budgets.networks.{name}", 1, [number for grid in grids for number in grid])
        sections.known("budgets.order", "order of tokens", (self.order,), ORDERS)
        for name in ("shares", "keeps"):
            values = getattr(self, name)
            sections.selection(f"budgets.{name}", values)
            if list(values) != sorted(values) or not 0 < values[0] <= values[-1] <= 1:
                raise ConfigError(f"budgets.{name}: expected shares above 0, at most 1, that ascend, found {values}")
        if not self.shares[0] <= self.keeps[0] <= self.keeps[-1] <= self.shares[-1]:
            raise ConfigError(
                f"budgets.keeps: expected shares from {self.shares[0]} to {self.shares[-1]}, found {self.keeps}"
            )
        sections.selection("budgets.choosers", self.choosers)
        sections.known("budgets.choosers", "chooser", self.choosers, (*choice.NAMES, MASS))
        sections.at_least("budgets.steps", 1, [self.steps])
        if not 1 <= self.parts <= self.steps:
            raise ConfigError(f"budgets.parts: expected 1 to {self.steps}, found {self.parts}")
        sections.at_least("budgets.rows", 16, [self.rows])
        sections.above_zero("budgets.max_seconds", self.max_seconds)


class Settings(Values, frozen=True):
    """What one case is run with. weights: of a network, or None for planted maps."""

    weights: _weights.Weights | None


class Row(rows.Timed, frozen=True, kw_only=True):
    """Attention of all layers of a pass, by lists that one chooser chose.

    maps: ``planted``, or of a network, ``trained`` here or ``official``; network, weights: its name, and what its
    weights are. keep: the share of the keys, for all heads alike, whose time was allowed. predicted_error, error: of
    the result of passes, L2 over that by dense attention, as errors add up and as it was on another run. Of the lists
    on that run: density, recall. limit_us, run_us: of a run, allowed and predicted; predicted_us: of the timed pass.
    relative_error: of the timed attention, against float64 over its lists, the worst of a head of each layer. solution,
    gap, solve_s: of the chooser.
    """

    kind: Literal["budgets"] = "budgets"
    version: Literal[1] = 1
    case: str = ""
    maps: str = ""
    network: str = ""
    weights: str = ""
    grid: str = ""
    tokens: Count = None
    layers: Count = None
    heads: Count = None
    head_dim: Count = None
    parts: Count = None
    keep: Number = None
    chosen_by: str = ""
    predicted_error: Number = None
    error: Number = None
    density: Number = None
    recall: Number = None
    limit_us: Number = None
    run_us: Number = None
    predicted_us: Number = None
    solution: str = ""
    gap: Number = None
    solve_s: Number = None


NAMED = "{maps} {network} {grid}, {chosen_by} at {keep}"


def cases(config):
    """Every shape on every grid, and every network on its grids."""
    section = config.budgets
    planted = [f"{heads}x{dim}-{_joined(grid)}" for heads, dim in section.shapes for grid in section.grids]
    return planted + [f"{name}-{_joined(grid)}" for name, grids in section.networks.items() for grid in grids]


def _joined(grid):
    return "x".join(map(str, grid))


def settings(config, case):
    """`Settings` of one case."""
    section, (name, _, _) = config.budgets, case.rpartition("-")
    weights = config.video.weights[name].at(name) if name in section.networks else None
    return sections.taken(Settings, section, weights=weights)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"network": "" if settings.weights is None else settings.weights.network}]


def modules(row, device):
    """Modules that a row depends on, see `experiments`."""
    own = [*devices.modules(device, "slices.executor", "slices.selection")]
    own += ["tilewright.slices.predictors.pooled", "tilewright.milp.highs", "tilewright.milp.gurobi"]
    if row.get("network"):
        own += ["tilewright.networks.wan", "tilewright.networks.video_attentions.dense"]
        own += ["tilewright_study.training.video"]
    return own


def sources(settings):
    """The user's own weights, or those that a rule trains."""
    return [] if settings.weights is None else _weights.sources(settings.weights)


def shape(case, settings):
    """``(layers, heads, head_dim, grid)`` of a case."""
    if settings.weights is None:
        heads, head_dim, grid = sizes(case)
        return 1, heads, head_dim, grid
    _, options = networks.parse_video(settings.weights.network, settings.weights.options)
    published = pattern.VARIANTS[options["variant"]]
    _, _, grid = sizes(f"{published.heads}x{pattern.HEAD_DIM}-{case.rpartition('-')[2]}")
    return options.get("layers", published.layers), published.heads, pattern.HEAD_DIM, grid


def size(case, settings):
    """Numbers that a case holds: tokens and lists of all layers."""
    layers, heads, head_dim, (t, h, w) = shape(case, settings)
    tokens = t * h * w
    return layers * slices.size(f"{heads}x{head_dim}-{t}x{h}x{w}", settings) + 8 * layers * heads * head_dim * tokens


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['p50_us']:,.1f} us, error {row['error']:.3f}"
