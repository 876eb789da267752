"""Execution paths of trained networks: what each takes and sees, what planners propose for budgets (stage T5)."""

import math
import os
from pathlib import Path
from typing import Literal

import msgspec

from tilewright import devices, networks, paths
from tilewright import milp as solvers
from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.networks.path import parse
from tilewright_study import planning, scenes, sections, training
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number
from tilewright_study.scenes import backends

TABLES = ("paths", "path_layers")
FIGURES = ("path_families", "scene")

# Where the rule `train` writes what it trains.
TRAINED = "results/checkpoints/{}.safetensors"
# The checkout that this package lies in.
CHECKOUT = Path(__file__).parents[4]
RUNGS = ("trained", "statistics")
SOLVERS = ("exhaustive", *solvers.NAMES)


class Network(sections.Section, frozen=True):
    """A network and its weights.

    network: by its name, such as segformer-b0-256
    checkpoint: a file of weights, also one that is trained here for another of the networks; null where they are
    trained here
    """

    network: str
    checkpoint: str | None

    @property
    def file(self):
        """The file of weights: of the checkout where the working folder has none. Settings do not depend on it."""
        return _found(self.checkpoint)


class Values(sections.Section, frozen=True):
    """What a network may have other values of.

    data: scenes, a folder with data.toml, or NAME=FOLDER of another source of tilewright_study.scenes with label maps
    bases: what is planned for, as the text of a path behind its blocks, such as scale=0.75; "" is the full path
    alone: further such texts, whose path with all blocks is measured, and not planned for
    rungs: trained, with the weights as they are; statistics, with those of the batch norm of each path
    fit: how many scenes models are fitted to
    choice: how many other scenes paths are chosen by
    test: how many further scenes results are stated for
    novel: how many scenes of objects that no network is trained on; 0 leaves them out
    drawn: random sets of blocks of each base that models are fitted to, beside all single ones
    timed: how many of these are timed, too: what blocks save asks for fewer than what they see
    every: whether all sets of blocks of the first base are measured
    budgets: of time, evenly spread, that are planned for; between them by a search alone
    solver: that plans, and whose plans a search goes on from
    rounds: of planning; what a round proposes is measured, and the models of the next one are fitted to it, too
    proposals: paths of a base that are measured because a round proposed them, at most
    samples: calls of each path that is promised, as a stream makes them
    batch: images of a call
    compiled: whether torch compiles blocks and decoders before calls are timed, and graphs captured on a GPU
    max_seconds: a timing stops after this time, in seconds
    """

    data: str
    bases: tuple[str, ...]
    alone: tuple[str, ...]
    rungs: tuple[str, ...]
    fit: int
    choice: int
    test: int
    novel: int
    drawn: int
    timed: int
    every: bool
    budgets: int
    solver: str
    rounds: int
    proposals: int
    samples: int
    batch: int
    compiled: bool
    max_seconds: float


class Section(Values, frozen=True):
    """Paths of trained networks.

    networks: by a name of one's own, <network>.<recipe> where the weights are trained here; null leaves one out
    network_settings: by such a name, other values than those below
    """

    networks: dict[str, Network | None]
    network_settings: dict[str, dict]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        for name in cases(config):
            stated = self.networks[name]
            sections.at(f"paths.networks.{name}", networks.parse, stated.network)
            if "paths" in config.experiments and config.recorded is None:
                _check_weights(name, stated, self.networks)
        _check_values("paths", self)
        sections.known("paths.network_settings", "network", self.network_settings, self.networks)
        for name in self.network_settings.keys() & set(cases(config)):
            _check_values(f"paths.network_settings.{name}", settings(config, name))


def _check_values(place, values):
    """Raise `ConfigError` for unknown names and for numbers out of range in a `Section` or `Settings`."""
    sections.at(f"{place}.data", scenes.named, values.data)
    sections.selection(f"{place}.bases", values.bases)
    sections.distinct(f"{place}.alone", (*values.bases, *values.alone))
    sections.selection(f"{place}.rungs", values.rungs)
    sections.known(f"{place}.rungs", "rung", values.rungs, RUNGS)
    sections.known(f"{place}.solver", "solver", (values.solver,), SOLVERS)
    for name in ("fit", "choice", "test", "budgets", "rounds", "proposals", "samples", "batch"):
        sections.at_least(f"{place}.{name}", 1, [getattr(values, name)])
    for name in ("novel", "drawn", "timed"):
        sections.at_least(f"{place}.{name}", 0, [getattr(values, name)])
    sections.above_zero(f"{place}.max_seconds", values.max_seconds)


def _check_weights(name, stated, others):
    """Raise `ConfigError` where weights are neither there nor made by the rule `train`, for a network or for others."""
    place = f"paths.networks.{name}"
    if stated.checkpoint is None:
        network, _, recipe = name.rpartition(".")
        if network != stated.network or recipe not in training.RECIPES:
            expected = " or ".join(f"{stated.network}.{recipe}" for recipe in training.RECIPES)
            raise ConfigError(f"{place}: expected the name {expected} of weights that are trained here, found {name!r}")
    elif stated.checkpoint in [TRAINED.format(other) for other, its in others.items() if its and not its.checkpoint]:
        return
    elif not Path(_found(stated.checkpoint)).is_file():
        recipe = name.rpartition(".")[2]
        recipe = recipe if recipe in training.RECIPES else training.RECIPES[0]
        raise ConfigError(
            f"{place}: no weights at {stated.checkpoint}; python workflow/scripts/train.py --network {stated.network} "
            f"--recipe {recipe} --output {stated.checkpoint} trains them, and checkpoint: null lets the study do so"
        )


class Settings(Values, frozen=True):
    """What one network is run with."""

    network: Network


class Row(rows.Typed, frozen=True, kw_only=True):
    """A path of a network on one rung, as `paths.table.Entry` has it, and besides:

    case: the configuration's name of the network. base: text of the path with all blocks; part: why it was measured,
    ``base``, ``single`` skip, ``drawn`` set, other such set that is ``seen`` and not timed, proposed ``earlier`` than
    in the last round, ``proposed``, ``every`` set or ``alone``, the first that holds: models are fitted to what stands
    before ``proposed``, those of time to what stands before ``seen``. skipped: blocks; saved_us, lost: beside the
    base, the latter on scenes of ``fit``. predicted: by the form or the Gaussian process, whichever errs less;
    held_out: the same of a path that it is fitted to, fitted without it, in cross-validation; loss_error: the median
    error of these; pairs: which of the two, of a form which pairs of blocks it has, and the scale on which losses add
    up; plan_seconds: of the solver and the search in the last round, for all budgets of this rung; proposed: by whom,
    for which budgets in microseconds.
    """

    kind: Literal["paths"] = "paths"
    version: Literal[1] = 1
    case: str = ""
    network: str = ""
    checkpoint: str = ""
    data: str = ""
    base: str = ""
    part: str = ""
    path: str = ""
    rung: str = ""
    batch: Count = None
    compiled: bool = False
    macs: Count = None
    skipped: Count = None
    p50_us: Number = None
    p99_us: Number = None
    promise_us: Number = None
    saved_us: Number = None
    predicted_us: Number = None
    fit: Number = None
    choice: Number = None
    test: Number = None
    novel: Number = None
    lost: Number = None
    predicted: Number = None
    held_out: Number = None
    loss_error: Number = None
    pairs: str = ""
    proposed: str = ""
    plan_seconds: Number = None
    energy: Number = None
    dominated: str = ""


NAMED = "{case} {rung} {path}"


def cases(config):
    """The networks that are not left out."""
    networks = {} if config.paths is None else config.paths.networks
    return [name for name, stated in networks.items() if stated is not None]


def settings(config, case):
    """`Settings` of one network; weights that are trained here have the path that the rule writes."""
    section = config.paths
    stated = section.networks[case]
    fields = {name: getattr(section, name) for name in Values.__struct_fields__}
    network = Network(stated.network, stated.checkpoint or TRAINED.format(case))
    own = section.network_settings.get(case, {})
    return sections.at(f"paths.network_settings.{case}", _converted, {"network": network} | fields | own)


def _found(path):
    """`path`, or the checkout's file of that name, as seen from here, where the working folder has none."""
    own = CHECKOUT / path
    return path if Path(path).is_file() or not own.is_file() else os.path.relpath(own)


def _converted(fields):
    """`Settings` of fields that may have come from a file."""
    return msgspec.convert({name: msgspec.to_builtins(value) for name, value in fields.items()}, Settings)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"network": settings.network.network, "data": settings.data}]


def modules(row, device):
    """Modules that a row depends on, see `experiments`."""
    own = [*devices.modules(device, "networks.maps"), *backends.modules(device)]
    parts = ("program", "exhaustive", "accuracy", "latency", "block_sets")
    own += [f"{paths.__name__}.table", *(f"{planning.__name__}.{name}" for name in parts)]
    if row.get("network"):
        family, _ = networks.parse(row["network"])
        own.append(f"tilewright.networks.{family}")
    if row.get("data"):
        own.append(f"tilewright_study.scenes.sources.{scenes.named(row['data'])}")
    return own


def named(settings, device):
    """The module of a solver that solves an integer program."""
    return [f"{solvers.__name__}.{settings.solver}"] if settings.solver in solvers.NAMES else []


def sources(settings):
    """The weights."""
    return [settings.network.checkpoint]


def size(case, settings):
    """Numbers that a case holds: scenes, and the network's activations of a batch."""
    _, options = networks.parse(settings.network.network)
    pixels = math.prod(sides.pair(options["image_size"]))
    return 4 * pixels * (settings.fit + settings.choice + settings.test + settings.novel + 64)


def texts(options, stated):
    """The paths with all blocks of `options` whose knobs `stated` lists. Raises `ConfigError`."""
    full = ".".join("1" * depth for depth in options.depths)
    return [parse(f"{full} {knobs}".strip(), options) for knobs in stated]


def recorded(rows):
    """All but sets that were seen beside others and neither timed nor promised."""
    return [row for row in rows if row["part"] != "seen" or row["promise_us"] or row["p50_us"]]


def remark(row):
    """What the log says of a row that passed."""
    seen = next((f"mIoU {row[split]:.3f}" for split in ("test", "choice", "fit") if row.get(split) is not None), "")
    return seen if row["p50_us"] is None else f"{row['p50_us']:,.0f} us, {seen}"


def budgets_for(models, count):
    """`count` budgets for bases: from what is predicted of the fastest path of all to the slowest base.

    models: pairs of `Latency` and `Losses`, one a base.
    """
    least = min(times.base_us - times.saved_us.clip(min=0).sum() for times, _ in models)
    return budgets_of(least, max(times.base_us for times, _ in models), count)


def budgets_of(least_us, most_us, count):
    """`count` budgets in microseconds, evenly from the fastest to the full path."""
    if count == 1:
        return [most_us]
    return [least_us + (most_us - least_us) * at / (count - 1) for at in range(count)]
