"""Pruned networks that were trained here: how many images they name right beside how many they run in a second (T5)."""

import shlex
from typing import Annotated, Literal

import msgspec

from tilewright import devices, networks
from tilewright.core.errors import ConfigError
from tilewright.networks import batching
from tilewright.networks.batching import UNPRUNED
from tilewright.packed import pruners
from tilewright_study import sections
from tilewright_study.experiments import pruned
from tilewright_study.measure.rows import Count, Number
from tilewright_study.scenes import backends

TABLES = ("pruned_accuracy",)
FIGURES = ("pruned_accuracy",)

FAMILY = pruned.FAMILY
# What the rule `classifier` writes: of a network and a seed all weights, and those with DynamicViT's trained predictor.
TRAINED = "results/classifiers/{}.safetensors"
PREDICTOR = "dynamicvit"

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Classifiers(sections.Section, frozen=True):
    """How the networks are trained, on crops of scenes.

    seconds: of the network, at most
    steps: of the network, at most; null is as many as there is time for
    predictor_seconds: of DynamicViT's predictor, at most, whose network stays as it is
    predictor_steps: of the predictor, at most
    keep_ratio: of the tokens, which the predictor is trained for
    batch: images of a step; null is the recipes' own
    """

    seconds: float
    steps: Positive | None
    predictor_seconds: float
    predictor_steps: Positive | None
    keep_ratio: float
    batch: Positive | None


class Section(sections.Section, frozen=True):
    """Accuracy beside speed of pruned networks, which are trained here.

    networks: seeds by the name of a network that is not pruned; each is a training of its own
    training: how they are trained
    pruners: settings of each pruner, all with the same weights
    crops: images that each is judged by, of known objects and as many of novel ones
    batching: how a network continues with images that keep different numbers of tokens; unpruned drops none
    modes: the batches of each mode, as in pruned
    dtype: of tokens and weights; null is that of the study
    max_seconds: a timing stops after this time, in seconds
    """

    networks: dict[str, tuple[int, ...]]
    training: Classifiers
    pruners: dict[str, tuple[dict, ...]]
    crops: Positive
    batching: tuple[str, ...]
    modes: dict[str, tuple[int, ...]]
    dtype: sections.Dtype | None
    max_seconds: float

    def check(self, config):
        """Raise `ConfigError` for unknown names, for networks that prune, and for numbers out of range."""
        for name, seeds in self.networks.items():
            check_network(name)
            sections.at_least(f"pruned_accuracy.networks.{name}", 0, seeds)
            sections.distinct(f"pruned_accuracy.networks.{name}", seeds)
        sections.known("pruned_accuracy.pruners", "pruner", self.pruners, [n for n in pruners.NAMES if n != "none"])
        sections.known("pruned_accuracy.batching", "batching", self.batching, (*batching.NAMES, UNPRUNED))
        sections.distinct("pruned_accuracy.batching", self.batching)
        pruned.check_modes("pruned_accuracy.modes", self.modes)
        sections.above_zero("pruned_accuracy.max_seconds", self.max_seconds)
        for name in ("seconds", "predictor_seconds"):
            sections.above_zero(f"pruned_accuracy.training.{name}", getattr(self.training, name))
        if not 0 < self.training.keep_ratio <= 1:
            raise ConfigError(
                f"pruned_accuracy.training.keep_ratio: expected above 0, at most 1, found {self.training.keep_ratio}"
            )


class Settings(sections.Section, frozen=True):
    """What one network and seed is run with; values as in `Section`. weights, predictor: files."""

    weights: str
    predictor: str
    pruners: dict[str, tuple[dict, ...]]
    crops: Positive
    batching: tuple[str, ...]
    modes: dict[str, tuple[int, ...]]
    max_seconds: float


class Row(pruned.Row, frozen=True, kw_only=True):
    """A trained network with one pruner, setting, batching, mode and batch; the other columns are those of ``pruned``.

    training: its seed. images: those that its network was trained on, blank for weights of others. predictor_images:
    those that DynamicViT's predictor was. crops: images of known and as many of novel objects. top1, top5: shares of
    the known ones that were named right, first or among five; novel_top1: of the novel ones. changed: of the known
    ones, the images that were named otherwise than with ``padded``. kept: the mean share of tokens after the last
    pruning.
    """

    kind: Literal["pruned_accuracy"] = "pruned_accuracy"
    version: Literal[1] = 1
    training: Count = None
    images: Count = None
    predictor_images: Count = None
    crops: Count = None
    top1: Number = None
    top5: Number = None
    novel_top1: Number = None
    changed: Count = None
    kept: Number = None


RUN = "tilewright_study.experiments.pruned_accuracy.run"
NAMED = "{network} {training} {pruner} {setting} {batching} {mode}, batch {batch}"


def check_network(name):
    """Raise `TilewrightError` unless `name` is a network that is trained and pruned."""
    family, options = sections.at("pruned_accuracy.networks", networks.parse, name)
    if family != FAMILY or options.get("pruner", "none") != "none":
        raise ConfigError(f"pruned_accuracy.networks: expected networks that are not pruned, found {name!r}")


def cases(config):
    """Every network with each of its seeds."""
    return [f"{name}.{seed}" for name, seeds in config.pruned_accuracy.networks.items() for seed in seeds]


def settings(config, case):
    """`Settings` of one network and seed."""
    section, (name, _, seed) = config.pruned_accuracy, case.rpartition(".")
    own = {name: getattr(section, name) for name in ("pruners", "crops", "batching", "max_seconds")}
    modes = {mode: sizes for mode, sizes in section.modes.items() if sizes}
    weights, predictor = TRAINED.format(case), TRAINED.format(f"{name}-{PREDICTOR}.{seed}")
    return Settings(weights=weights, predictor=predictor, modes=modes, **own)


def sources(settings):
    """The weights, and those with a trained predictor where it is used."""
    return [settings.weights, *([settings.predictor] if settings.pruners.get(PREDICTOR) else [])]


def arguments_of_training(config, case):
    """The flags of ``train_classifier.py`` for a case: a list of words for a shell, quoted."""
    name, _, seed = case.rpartition(".")
    training = config.pruned_accuracy.training
    optional = {"batch": training.batch, "steps": training.steps, "predictor-steps": training.predictor_steps}
    stated = [word for name, n in optional.items() if n is not None for word in (f"--{name}", str(n))]
    compiled = ["--compiled"] if devices.facts(config.device).GPU_TIMER else []
    return [
        *("--network", shlex.quote(name), "--seed", seed, "--seconds", str(training.seconds)),
        *("--predictor-seconds", str(training.predictor_seconds), "--keep-ratio", str(training.keep_ratio)),
        *("--device", config.device, *stated, *compiled),
    ]


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    name, _, _ = case.rpartition(".")
    return [
        {"network": name, "pruner": pruner, "batching": each}
        for pruner in settings.pruners
        for each in settings.batching
    ]


def modules(row, device):
    """Modules that a row depends on, see `experiments`."""
    own = ["tilewright_study.scenes.sources.crops", *devices.modules(device), *backends.modules(device)]
    # A row that says that there are no weights has no pruner.
    return [*own, *pruned.modules(row, device)] if row.get("pruner") else own


def modules_of_training(network, device):
    """Dotted names of the modules by which a network is trained, and DynamicViT's predictor for it."""
    family, _ = networks.parse(network)
    own = (f"masks.{family}", f"networks.{family}", "networks.batching.padded")
    return [
        *(f"tilewright.{name}" for name in (*own, "packed.pruners.none", "packed.pruners.dynamicvit")),
        "tilewright_study.scenes.sources.crops",
        *devices.modules(device),
        *backends.modules(device),
    ]


def size(case, settings):
    """Numbers that a case holds: its crops above all."""
    side = networks.parse(case.rpartition(".")[0])[1]["image_size"]
    return 6 * settings.crops * side**2 + 50 * side**2


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['top1']:.1%} right, {row['images_per_s']:,.0f} images/s"
