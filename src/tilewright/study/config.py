"""The study's configuration: read once, strictly, into frozen values, before the first job.

Selections are lists, definitions are maps, so that an overlay replaces the former and merges into the latter. Nothing
has a default here: ``config.yaml`` names every value. Names are checked against the registries, and every
`ConfigError` says where the value stands and what is known. Descriptions are part of the types: ``make schema`` writes
them to ``config/schema.json``, for editors.
"""

import json
from typing import Annotated, Literal

import msgspec

from tilewright import models, networks, pruners, reorder, targets
from tilewright.baselines import packed as packed_baselines
from tilewright.baselines import sparse as sparse_baselines
from tilewright.blocks import tiles
from tilewright.core import registry
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.networks import attentions, batching
from tilewright.networks.batching import MODES
from tilewright.schedule.search import NAMES as SOLVERS

# Ours, and what it is measured against.
RAGGED = ("tilewright", *packed_baselines.NAMES)


def _says(description):
    return msgspec.Meta(description=description)


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the configuration."""


class Schedule(_Strict):
    """What the solvers optimise and when they may stop (stage T4)."""

    objective: Annotated[
        Literal["sum", "paper"], _says("sum adds the rounds' times up, paper takes the longest round, as published")
    ]
    time_limit_s: Annotated[float, _says("a solver stops after this time, in seconds")]
    gap: Annotated[float, _says("a solver stops at this relative gap between its answer and its bound")]
    rounds: Annotated[int | None, _says("most rounds of a schedule; null is the device's own")]
    max_tile_kinds: Annotated[int | None, _says("most kinds of tiles in a round; null is the device's own")]


class Bench(_Strict):
    """What is run and timed, and how often (stages T3 and T5)."""

    tile_sets: Annotated[dict[str, tuple[str, ...]], _says("the solvers whose schedules are run, by tile set")]
    baselines: Annotated[tuple[str, ...], _says("what schedules are measured against")]
    baseline_orders: Annotated[
        tuple[str, ...],
        _says("orders in which the baselines get their tokens, the first of them also those that work in no order"),
    ]
    rse: Annotated[float, _says("a timing stops at this relative standard error")]
    min_repetitions: Annotated[int, _says("fewest repetitions of a timing")]
    max_seconds: Annotated[float, _says("a timing stops after this time, in seconds")]
    max_dense_tokens: Annotated[int, _says("a longer sequence is not run densely, and its row says so")]


class Networks(_Strict):
    """Whole networks, run end to end (stage T5)."""

    workloads: Annotated[tuple[str, ...], _says("networks by name")]
    attention: Annotated[
        dict[str, tuple[int, ...]], _says("batches that each kind of attention is timed with; one without is left out")
    ]
    max_seconds: Annotated[float, _says("a timing of a network stops after this time, in seconds")]


class Ragged(_Strict):
    """Attention of packed images (stage T5)."""

    shapes: Annotated[tuple[tuple[int, int], ...], _says("pairs of heads and the dimension of a head")]
    lengths: Annotated[
        tuple[tuple[int, int], ...], _says("pairs (low, high) that the tokens of an image are drawn from, uniformly")
    ]
    attention: Annotated[
        dict[str, tuple[int, ...]],
        _says("for each provider, ours and its baselines, the numbers of images it is timed with; none leaves it out"),
    ]
    max_seconds: Annotated[float, _says("a timing stops after this time, in seconds")]


class Pruned(_Strict):
    """Pruned networks, run end to end (stage T5)."""

    workloads: Annotated[tuple[str, ...], _says("pruned networks by name")]
    settings: Annotated[
        dict[str, tuple[dict, ...]],
        _says("by network, the settings of its pruner that are run; its own where none are stated"),
    ]
    attention: Annotated[tuple[str, ...], _says("how a network goes on with the tokens that it keeps")]
    modes: Annotated[
        dict[str, tuple[int, ...]],
        _says(
            "the batches of each mode: eager, graph (a CUDA graph), compile, compile_graph (what was compiled, as one)"
        ),
    ]
    of: Annotated[dict[str, dict[str, tuple[int, ...]]], _says("modes of networks that have their own")]
    max_seconds: Annotated[float, _says("a timing stops after this time, in seconds")]


class Heatmap(_Strict):
    """Speed-up of DynamicViT by resolution and patch size."""

    resolutions: Annotated[tuple[int, ...], _says("sides of the images, in pixels")]
    patches: Annotated[tuple[int, ...], _says("sides of the patches, in pixels")]
    max_tokens: Annotated[int, _says("a cell with more tokens is blank, with the reason")]
    order: Annotated[str, _says("the order of its plans")]
    solver: Annotated[str, _says("the solver of its plans")]


class ReorderTimes(_Strict):
    """Time of each order against the number of tokens."""

    workloads: Annotated[tuple[str, ...], _says("workloads, from small to large, on which every order is timed")]


class Figures(_Strict):
    """What the figures show in detail."""

    pattern_workloads: Annotated[
        tuple[str, ...], _says("one of each family, whose masks are drawn under every order, with their blocks")
    ]
    pattern_tiles: Annotated[tuple[str, ...], _says("tiles of the blocks that are drawn")]
    fill_workloads: Annotated[tuple[str, ...], _says("workloads whose fill is shown by order and tile")]
    fill_tiles: Annotated[tuple[str, ...], _says("tiles whose fill is shown; they need not be profiled")]
    gantt_workload: Annotated[str | None, _says("the workload whose schedule is drawn lane by lane; null: none")]
    gantt_order: Annotated[str, _says("the order of that schedule")]


class Config(_Strict):
    """The whole study."""

    recorded: Annotated[
        str | None,
        _says(
            "a folder of the checkout whose logs stand in for results/logs, so that what a device measured is shown "
            "where it is not; or null"
        ),
    ]
    device: Annotated[str, _says("the kind of device that is timed: cpu or cuda")]
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], _says("of the tokens and of whole networks")]
    workloads: Annotated[tuple[str, ...], _says("attention graphs by name: <family>-<variant>-<resolution>[-<stage>]")]
    models: Annotated[dict[str, dict], _says("overrides of parameters, by workload")]
    orders: Annotated[tuple[str, ...], _says("orders of the tokens")]
    reorder: Annotated[dict[str, dict], _says("settings by order; what is left out is tuned on the graph")]
    tiles: Annotated[tuple[str, ...], _says("tiles that are profiled, as <queries>x<keys>")]
    tile_sets: Annotated[dict[str, tuple[str, ...]], _says("what a schedule may choose from, by name")]
    solvers: Annotated[tuple[str, ...], _says("what finds schedules: greedy, descent, or an integer program's solver")]
    region_rows: Annotated[int, _says("rows of the coarsest groups")]
    split_keys: Annotated[
        int | None, _says("a block with more keys, and many more than the rest, is split and merged; null never splits")
    ]
    seed: Annotated[int, _says("of everything random")]
    schedule: Schedule
    bench: Bench
    networks: Networks
    ragged: Ragged
    pruned: Pruned
    heatmap: Heatmap
    reorder_times: ReorderTimes
    figures: Figures

    @property
    def benched(self):
        """Pairs (tile set, solver) whose schedules are run."""
        return tuple((name, solver) for name, chosen in self.bench.tile_sets.items() for solver in chosen)


def schema():
    """The JSON schema of a whole ``config.yaml``, for editors; overlays hold a part of it.

    Names, ranges and what belongs together are checked by `load` alone.
    """
    found = msgspec.json.schema(Config)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Tilewright's config.yaml", **found}


def load(mapping):
    """Turn a parsed ``config.yaml`` (overlays merged in) into a checked `Config`. Raises `ConfigError`."""
    try:
        config = msgspec.convert(mapping, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
    _check_names(config)
    _check_ranges(config)
    return config


def _check_names(config):
    figures = config.figures
    _known("device", "kind of device", (config.device,), targets.NAMES)
    for place in ("orders", "tiles", "solvers"):
        _selection(place, getattr(config, place))
    _distinct("workloads", config.workloads)
    for place, names in {
        "workloads": config.workloads,
        "models": config.models,
        "reorder_times.workloads": config.reorder_times.workloads,
        "figures.pattern_workloads": figures.pattern_workloads,
        "figures.fill_workloads": figures.fill_workloads,
    }.items():
        for name in names:
            # The reorder times build their workloads from the names alone.
            overrides = {} if place == "reorder_times.workloads" else config.models.get(name, {})
            _at(place, models.parse, name, overrides)
    _known("orders", "order", config.orders, reorder.NAMES)
    for name, params in config.reorder.items():
        module = _at("reorder", registry.member, "tilewright.reorder", "order", name, reorder.NAMES)
        _at(f"reorder.{name}", msgspec.convert, params, module.Params)
    for place, names in {
        "tiles": config.tiles,
        "figures.pattern_tiles": figures.pattern_tiles,
        "figures.fill_tiles": figures.fill_tiles,
    }.items():
        for name in names:
            _at(place, tiles.parse, name)
    for name, members in config.tile_sets.items():
        _selection(f"tile_sets.{name}", members)
        _known(f"tile_sets.{name}", "tile", members, config.tiles)
        if name in config.tiles and members != (name,):
            raise ConfigError(f"tile_sets.{name}: the name of a tile; expected [{name}], found {list(members)}")
    _known("solvers", "solver", config.solvers, SOLVERS)
    _known("heatmap.order", "order", (config.heatmap.order,), reorder.NAMES)
    _known("heatmap.solver", "solver", (config.heatmap.solver,), SOLVERS)
    _selection("bench.tile_sets", tuple(config.bench.tile_sets))
    _known("bench.tile_sets", "tile set", config.bench.tile_sets, config.tile_sets)
    for name, chosen in config.bench.tile_sets.items():
        _selection(f"bench.tile_sets.{name}", chosen)
        _known(f"bench.tile_sets.{name}", "solver", chosen, config.solvers)
    _known("bench.baselines", "baseline", config.bench.baselines, sparse_baselines.NAMES)
    _selection("bench.baseline_orders", config.bench.baseline_orders)
    _known("bench.baseline_orders", "order", config.bench.baseline_orders, reorder.NAMES)
    _distinct("networks.workloads", config.networks.workloads)
    for name in config.networks.workloads:
        _at("networks.workloads", networks.parse, name)
    _known("networks.attention", "attention", config.networks.attention, attentions.NAMES)
    for name, batches in config.networks.attention.items():
        _distinct(f"networks.attention.{name}", batches)
    _check_pruned(config)
    if figures.gantt_workload is not None:
        _known("figures.gantt_workload", "workload", (figures.gantt_workload,), config.workloads)
    _known("figures.gantt_order", "order", (figures.gantt_order,), config.orders)


def _check_pruned(config):
    ragged, pruned = config.ragged, config.pruned
    _distinct("ragged.shapes", ragged.shapes)
    _distinct("ragged.lengths", ragged.lengths)
    _known("ragged.attention", "attention", ragged.attention, RAGGED)
    _distinct("pruned.workloads", pruned.workloads)
    _known("pruned.attention", "strategy", pruned.attention, batching.NAMES)
    _distinct("pruned.attention", pruned.attention)
    for place, modes in {"pruned.modes": pruned.modes, **{f"pruned.of.{m}": x for m, x in pruned.of.items()}}.items():
        _known(place, "mode", modes, MODES)
        for mode, batches in modes.items():
            if (least := min(batches, default=1)) < 1:
                raise ConfigError(f"{place}: {mode}: expected at least 1, found {least}")
    for low, high in ragged.lengths:
        if low > high:
            raise ConfigError(f"ragged.lengths: expected the least first, found [{low}, {high}]")
    for name in dict.fromkeys((*pruned.workloads, *pruned.settings, *pruned.of)):
        family, options = _at("pruned.workloads", networks.parse, name)
        if family != "deit":
            raise ConfigError(f"pruned.workloads: expected networks named deit-..., found {name!r}")
        # What settings a pruner has, only its own module knows, which needs torch: the job checks them.
        _known("pruned.workloads", "pruner", (options.get("pruner", "none"),), pruners.NAMES)


def _check_ranges(config):
    schedule, bench, heatmap = config.schedule, config.bench, config.heatmap
    batches, ragged, pruned = config.networks.attention, config.ragged, config.pruned
    least = {
        "region_rows": (config.region_rows, max(tiles.parse(name).rows for name in config.tiles)),
        "split_keys": (config.split_keys, 1),
        "schedule.rounds": (schedule.rounds, 1),
        "schedule.max_tile_kinds": (schedule.max_tile_kinds, 1),
        "bench.min_repetitions": (bench.min_repetitions, 3),
        "bench.max_dense_tokens": (bench.max_dense_tokens, 1),
        **{f"networks.attention.{name}": (min(sizes, default=1), 1) for name, sizes in batches.items()},
        "ragged.shapes": (min((min(shape) for shape in ragged.shapes), default=1), 1),
        "ragged.lengths": (min((low for low, _ in ragged.lengths), default=1), 1),
        **{f"ragged.attention.{name}": (min(sizes, default=1), 1) for name, sizes in ragged.attention.items()},
        "heatmap.max_tokens": (heatmap.max_tokens, 1),
        "heatmap.resolutions": (min(heatmap.resolutions, default=1), 1),
        "heatmap.patches": (min(heatmap.patches, default=1), 1),
    }
    for place, (value, bound) in least.items():
        # What may be left open, is null then.
        if value is not None and value < bound:
            raise ConfigError(f"{place}: expected at least {bound}, found {value}")
    above_zero = {
        "schedule.time_limit_s": schedule.time_limit_s,
        "bench.rse": bench.rse,
        "bench.max_seconds": bench.max_seconds,
        "networks.max_seconds": config.networks.max_seconds,
        "ragged.max_seconds": ragged.max_seconds,
        "pruned.max_seconds": pruned.max_seconds,
    }
    for place, value in above_zero.items():
        if not value > 0:
            raise ConfigError(f"{place}: expected a number above 0, found {value}")
    if not 0 <= schedule.gap < 1:
        raise ConfigError(f"schedule.gap: expected a fraction from 0 to 1, found {schedule.gap}")
    if config.networks.workloads and not any(batches.values()):
        raise ConfigError("networks.attention: expected a batch for at least one attention, found none")


def _at(place, call, *arguments):
    """Call, and let what goes wrong name its place in the configuration."""
    try:
        return call(*arguments)
    except (TilewrightError, msgspec.ValidationError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _known(place, what, names, known):
    for name in names:
        if name not in known:
            raise ConfigError(f"{place}: unknown {what} {name!r}; known: {', '.join(known)}")


def _selection(place, names):
    if not names:
        raise ConfigError(f"{place}: expected at least one name, found none")
    _distinct(place, names)


def _distinct(place, values):
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ConfigError(f"{place}: {twice[0]!r} stands twice")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
