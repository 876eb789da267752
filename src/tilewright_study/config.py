"""The study's configuration: read once, strictly, into frozen values, before the first job.

Selections are lists, definitions are maps, so that an overlay replaces the former and merges into the latter. Nothing
has a default here: ``config.yaml`` names every value. Names are checked against the registries, and every
`ConfigError` says where the value stands and what is known. Each experiment declares its own section, see
`tilewright_study.experiments`; what all share stands here. The docstrings of the sections are the descriptions that
``make schema`` writes to ``config/schema.json``, for editors.
"""

import json
import typing
from pathlib import Path
from typing import Literal

import msgspec

from tilewright import devices, networks
from tilewright import masks as models
from tilewright.attention import reorder
from tilewright.attention.blocks import tiles
from tilewright.attention.schedule.search import NAMES as SOLVERS
from tilewright.core import registry
from tilewright.core.errors import ConfigError
from tilewright_study import experiments, orders, scenes, sections, training
from tilewright_study.sections import Section


class Schedule(Section, frozen=True):
    """What the solvers optimise and when they may stop (stage T4).

    objective: sum adds the rounds' times up, paper takes the longest round, as published
    time_limit_s: a solver stops after this time, in seconds
    gap: a solver stops at this relative gap between its answer and its bound
    rounds: most rounds of a schedule; null is the device's own
    max_tile_kinds: most kinds of tiles in a round; null is the device's own
    """

    objective: Literal["sum", "paper"]
    time_limit_s: float
    gap: float
    rounds: int | None
    max_tile_kinds: int | None

    def check(self, config):
        """Raise `ConfigError` for a number out of range."""
        for name in ("rounds", "max_tile_kinds"):
            sections.at_least(f"schedule.{name}", 1, [getattr(self, name)])
        sections.above_zero("schedule.time_limit_s", self.time_limit_s)
        if not 0 <= self.gap < 1:
            raise ConfigError(f"schedule.gap: expected a fraction from 0 to 1, found {self.gap}")


class Timing(Section, frozen=True):
    """When a timing is good enough (stage T5); each experiment has a longest time of its own.

    rse: a timing stops at this relative standard error
    min_repetitions: fewest repetitions of a timing
    """

    rse: float
    min_repetitions: int

    def check(self, config):
        """Raise `ConfigError` for a number out of range."""
        sections.above_zero("timing.rse", self.rse)
        sections.at_least("timing.min_repetitions", 3, [self.min_repetitions])


class Training(Section, frozen=True):
    """How the rule `train` trains networks for segmentation; nothing of the study asks for it by default.

    data: a source of images with labels, scenes, or camvid, ade20k or cityscapes with =<folder>
    minutes: how long each recipe takes, by its name, or by <network>.<recipe> where a network needs other ones
    size: pixels of a side of all images of a training; null is the recipe's own sizes
    batch: images of a step where size is stated; null is the recipe's own
    """

    data: str
    minutes: dict[str, float]
    size: int | None
    batch: int | None

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        sections.known("training.data", "source", (self.data.partition("=")[0],), scenes.NAMES)
        for name, minutes in self.minutes.items():
            network, _, recipe = name.rpartition(".")
            sections.known("training.minutes", "recipe", [recipe], training.RECIPES)
            if network:
                sections.at("training.minutes", networks.parse, network)
            sections.above_zero(f"training.minutes.{name}", minutes)
        sections.at_least("training.size", 32, [self.size])
        sections.at_least("training.batch", 1, [self.batch])
        if self.batch is not None and self.size is None:
            raise ConfigError("training.batch: expected training.size, too, found none")

    def minutes_of(self, network, recipe):
        """How long a network takes by a recipe."""
        own = f"{network}.{recipe}"
        return self.minutes[own if own in self.minutes else recipe]


class Figures(Section, frozen=True):
    """What the figures show in detail.

    pattern_workloads: one of each family, whose masks are drawn under every order, with their blocks
    pattern_tiles: tiles of the blocks that are drawn
    fill_workloads: workloads whose fill is shown by order and tile
    fill_tiles: tiles whose fill is shown; they need not be profiled
    """

    pattern_workloads: tuple[str, ...]
    pattern_tiles: tuple[str, ...]
    fill_workloads: tuple[str, ...]
    fill_tiles: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names."""
        _workloads("figures.pattern_workloads", self.pattern_workloads, config.models)
        _workloads("figures.fill_workloads", self.fill_workloads, config.models)
        _tiles("figures.pattern_tiles", self.pattern_tiles)
        _tiles("figures.fill_tiles", self.fill_tiles)


class Shared(Section, frozen=True, kw_only=True):
    """The whole study.

    experiments: the experiments that are run, see tilewright_study.experiments
    recorded: a folder of the checkout whose rows stand in for results/logs, so that what a device measured is shown
        where it is not; or null
    device: the kind of device that is timed, such as cpu or cuda
    dtype: of the tokens and of whole networks
    workloads: attention graphs by name, <family>-<variant>-<resolution>[-<stage>]
    models: overrides of parameters, by workload
    orders: orders of the tokens
    reorder: settings by order; what is left out is tuned on the graph
    tiles: tiles that are profiled, as <queries>x<keys>
    tile_sets: what a schedule may choose from, by name; null leaves one out
    solvers: what finds schedules, that is greedy, descent, or an integer program's solver
    region_rows: rows of the coarsest groups
    split_keys: a block with more keys, and many more than the rest, is split and merged; null never splits
    seed: of everything random
    schedule: what the solvers optimise and when they may stop
    timing: when a timing of stage T5 is good enough
    training: how the rule train trains networks for segmentation
    figures: what the figures show in detail
    """

    experiments: tuple[str, ...]
    recorded: str | None
    device: str
    dtype: sections.Dtype
    workloads: tuple[str, ...]
    models: dict[str, dict]
    orders: tuple[str, ...]
    reorder: dict[str, dict]
    tiles: tuple[str, ...]
    tile_sets: dict[str, tuple[str, ...] | None]
    solvers: tuple[str, ...]
    region_rows: int
    split_keys: int | None
    seed: int
    schedule: Schedule
    timing: Timing
    training: Training
    figures: Figures

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range, in what all experiments share."""
        sections.known("experiments", "experiment", self.experiments, experiments.NAMES)
        sections.distinct("experiments", self.experiments)
        sections.known("device", "kind of device", (self.device,), devices.NAMES)
        for place in ("orders", "tiles", "solvers"):
            sections.selection(place, getattr(self, place))
        sections.distinct("workloads", self.workloads)
        _workloads("workloads", self.workloads, self.models)
        _workloads("models", self.models, self.models)
        sections.known("orders", "order", self.orders, reorder.NAMES)
        _orders(self.reorder)
        _tiles("tiles", self.tiles)
        _tile_sets(self)
        sections.known("solvers", "solver", self.solvers, SOLVERS)
        sections.at_least("region_rows", max(tiles.parse(name).rows for name in self.tiles), [self.region_rows])
        sections.at_least("split_keys", 1, () if self.split_keys is None else (self.split_keys,))


Config = msgspec.defstruct(
    "Config",
    [(name, module.Section | None, None) for name, module in experiments.sections().items()],
    bases=(Shared,),
    module=__name__,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    namespace={"__doc__": Shared.__doc__},
)


def schema():
    """The JSON schema of a whole ``config.yaml``, for editors; overlays hold a part of it.

    Names, ranges and what belongs together are checked by `load` alone.
    """
    own = experiments.sections()
    found = json.dumps(msgspec.json.schema(Config))
    for name, module in own.items():
        # Sections of several experiments have the same class name, which msgspec tells apart by their modules.
        found = found.replace(f"{module.Section.__module__}.Section", name)
    found = json.loads(found)
    types = {each.__name__: each for each in _nested(Config) if each.__name__ in found["$defs"]}
    types |= {name: module.Section for name, module in own.items()}
    for name, section in types.items():
        text, values = sections.descriptions(section)
        values |= {key: sections.descriptions(types[key])[0] for key in own if section is Config}
        properties = {key: {"description": values[key], **value} for key, value in _properties(found, name)}
        found["$defs"][name] |= {"title": name, "description": text, "properties": properties}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Tilewright's config.yaml", **found}


def _nested(struct):
    """`struct` and all structs that its values are made of."""
    yield struct
    hints = list(typing.get_type_hints(struct).values())
    while hints:
        hint = hints.pop()
        hints += typing.get_args(hint)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _nested(hint)


def _properties(found, name):
    return found["$defs"][name]["properties"].items()


def load(mapping):
    """Turn a parsed ``config.yaml`` (overlays merged in) into a checked `Config`. Raises `ConfigError`."""
    try:
        config = msgspec.convert(_without_left_out(mapping), Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
    Shared.check(config, config)
    stated = {
        name: getattr(config, name) for name in ("schedule", "timing", "training", "figures", *experiments.sections())
    }
    for name in config.experiments:
        if stated[experiments.section_of(name)] is None:
            place = experiments.section_of(name)
            raise ConfigError(f"experiments: {name!r} is selected; expected its section {place!r}, found none")
    for section in filter(None, stated.values()):
        section.check(config)
    return config


def recorded(config, root):
    """`config`, of a study of the checkout `root`, with those experiments alone that its folder of recorded rows holds:
    a run may have left some out. Raises `ConfigError` where it holds none."""
    if config.recorded is None:
        return config
    folder = Path(root, config.recorded)
    there = tuple(name for name in config.experiments if (folder / f"{name}.csv").is_file())
    if not there:
        raise ConfigError(
            f"recorded: expected rows of {', '.join(config.experiments)}, found none in {config.recorded}"
        )
    return msgspec.structs.replace(config, experiments=there)


def _without_left_out(mapping):
    """`mapping` without tile sets that an overlay leaves out by null, and their schedules."""
    sets, section = mapping.get("tile_sets"), mapping.get("attention")
    if not isinstance(sets, dict):
        return mapping
    kept = {name: tiles for name, tiles in sets.items() if tiles is not None}
    found = mapping | {"tile_sets": kept}
    if isinstance(section, dict) and isinstance(section.get("schedules"), dict):
        left_out = sets.keys() - kept.keys()
        stated = section["schedules"].items()
        chosen = {name: solvers for name, solvers in stated if solvers is not None and name not in left_out}
        found["attention"] = section | {"schedules": chosen}
    return found


def _workloads(place, names, overrides):
    for name in names:
        sections.at(place, models.parse, name, overrides.get(name, {}))


def _tiles(place, names):
    for name in names:
        sections.at(place, tiles.parse, name)


def _orders(settings):
    """Raise `ConfigError` for settings of an unknown order, and for unknown settings of an order."""
    for name, params in settings.items():
        sections.at("reorder", registry.check, "order", name, reorder.NAMES)
        sections.at(f"reorder.{name}", orders.parse, name, params)


def _tile_sets(config):
    """Raise `ConfigError` for a tile set of unknown tiles, or that has a tile's name and is another one."""
    for name, members in config.tile_sets.items():
        sections.selection(f"tile_sets.{name}", members)
        sections.known(f"tile_sets.{name}", "tile", members, config.tiles)
        if name in config.tiles and members != (name,):
            raise ConfigError(f"tile_sets.{name}: the name of a tile; expected [{name}], found {list(members)}")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
