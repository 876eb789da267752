"""Pruned networks that were trained here: how many images they name right beside how many they run in a second (T5)."""

import shlex
from typing import Annotated, Literal

import msgspec

from tilewright import devices, networks
from tilewright.core.errors import ConfigError
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


class Values(pruned.Values, frozen=True):
    """What all trainings are run with.

    pruners: settings of each pruner, all with the same weights
    crops: images that each is judged by, of known objects and as many of novel ones
    """

    pruners: dict[str, tuple[dict, ...]]
    crops: Positive


class Section(Values, frozen=True):
    """Accuracy beside speed of pruned networks, which are trained here.

    networks: seeds by the name of a network that is not pruned; each is a training of its own
    training: how they are trained
    dtype: of tokens and weights; null is that of the study
    """

    networks: dict[str, tuple[int, ...]]
    training: Classifiers
    dtype: sections.Dtype | None

    def check(self, config):
        """Raise `ConfigError` for unknown names, for networks that prune, and for numbers out of range."""
        for name, seeds in self.networks.items():
            check_network(name)
            sections.at_least(f"pruned_accuracy.networks.{name}", 0, seeds)
            sections.distinct(f"pruned_accuracy.networks.{name}", seeds)
        sections.known("pruned_accuracy.pruners", "pruner", self.pruners, [n for n in pruners.NAMES if n != "none"])
        self.check_values("pruned_accuracy")
        for name in ("seconds", "predictor_seconds"):
            sections.above_zero(f"pruned_accuracy.training.{name}", getattr(self.training, name))
        if not 0 < self.training.keep_ratio <= 1:
            raise ConfigError(
                f"pruned_accuracy.training.keep_ratio: expected above 0, at most 1, found {self.training.keep_ratio}"
            )


class Settings(Values, frozen=True):
    """What one network and seed is run with. weights, predictor: files."""

    weights: str
    predictor: str


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
    weights, predictor = TRAINED.format(case), TRAINED.format(f"{name}-{PREDICTOR}.{seed}")
    return sections.taken(Settings, section, weights=weights, predictor=predictor, modes=section.timed)


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
