"""Pruned networks, from images to logits, with each batching of the kept tokens (stage T5)."""

from typing import Literal

from tilewright import devices, networks
from tilewright.core.errors import ConfigError
from tilewright.networks import batching
from tilewright.networks.batching import MODES, UNPRUNED
from tilewright.packed import pruners
from tilewright_study import sections
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("pruned",)
FIGURES = ("pruned",)

FAMILY = "deit"


class Values(sections.Section, frozen=True):
    """What all networks are run with.

    batching: how a network continues with images that keep different numbers of tokens; unpruned drops none
    modes: the batches of each mode, that is eager, graph (a CUDA graph), compile, compile_graph (both)
    max_seconds: a timing stops after this time, in seconds
    """

    batching: tuple[str, ...]
    modes: dict[str, tuple[int, ...]]
    max_seconds: float

    def check_values(self, place):
        """Raise `ConfigError` for unknown names and for numbers out of range, at a `place` of the configuration."""
        sections.known(f"{place}.batching", "batching", self.batching, (*batching.NAMES, UNPRUNED))
        sections.distinct(f"{place}.batching", self.batching)
        check_modes(f"{place}.modes", self.modes)
        sections.above_zero(f"{place}.max_seconds", self.max_seconds)

    @property
    def timed(self):
        """The modes that have a batch."""
        return {mode: sizes for mode, sizes in self.modes.items() if sizes}


class Section(Values, frozen=True):
    """Pruned networks, run end to end.

    workloads: pruned networks by name
    settings: by network, the settings of its pruner that are run, a checkpoint of official weights among them; its own
        where none are stated
    network_modes: modes of networks that have their own
    dtype: of tokens and weights; null is that of the study
    """

    workloads: tuple[str, ...]
    settings: dict[str, tuple[dict, ...]]
    network_modes: dict[str, dict[str, tuple[int, ...]]]
    dtype: sections.Dtype | None

    def check(self, config):
        """Raise `ConfigError` for unknown names, for networks without a pruner, and for numbers out of range."""
        sections.distinct("pruned.workloads", self.workloads)
        self.check_values("pruned")
        if self.workloads and not self.batching:
            raise ConfigError("pruned.batching: expected at least one name, found none")
        for name, modes in self.network_modes.items():
            check_modes(f"pruned.network_modes.{name}", modes)
        for name in dict.fromkeys((*self.workloads, *self.settings, *self.network_modes)):
            _check_network(name)


class Settings(Values, frozen=True):
    """What one network is run with. settings: those of its pruner."""

    settings: tuple[dict, ...]


class Row(rows.Compared, frozen=True, kw_only=True):
    """A network with one setting, batching, mode and batch.

    fewest_kept, most_kept: tokens of an image after the last pruning, over the images of the batch; spread: by how many
    tokens two of them differ, after the pruning where that is most. capacity: see `networks.deit.Network.forward`.
    inputs: images whose logits were compared; same_tokens: those that kept the tokens that they keep under ``padded``.
    max_abs_error, relative_error (of an image's logits, by how far they spread around their mean; it has the tolerance)
    and same_top1 are of these. max_abs_error_all and same_top1_all are of all images and judge nothing: where scores
    are nearly equal, rounding decides which token is kept. attention_error: see `_pruned._attention_error`. p50_us:
    until the logits are there. pack_us: packing and finding the class tokens alone (GPU time on a GPU); pack_share: of
    p50_us.
    """

    kind: Literal["pruned"] = "pruned"
    version: Literal[1] = 1
    network: str = ""
    variant: str = ""
    resolution: Count = None
    pruner: str = ""
    setting: str = ""
    batching: str = ""
    mode: str = ""
    batch: Count = None
    parameters: Count = None
    tokens: Count = None
    fewest_kept: Count = None
    most_kept: Count = None
    spread: Count = None
    capacity: Count = None
    inputs: Count = None
    same_tokens: Count = None
    largest_logit: Number = None
    same_top1: Number = None
    max_abs_error_all: Number = None
    same_top1_all: Number = None
    attention_error: Number = None
    attention_tolerance: Number = None
    first_call_s: Number = None
    images_per_s: Number = None
    pack_us: Number = None
    pack_share: Number = None


NAMED = "{network} {setting} {batching} {mode}, batch {batch}, {same_tokens} of {inputs} with the same tokens"


def check_modes(place, modes):
    """Raise `ConfigError` for batches of `modes` at a `place` of the configuration that cannot be run."""
    sections.batches(place, "mode", modes, MODES)
    if not any(modes.values()):
        raise ConfigError(f"{place}: expected a batch for at least one mode, found none")


def _check_network(name):
    family, options = sections.at("pruned.workloads", networks.parse, name)
    if family != FAMILY:
        raise ConfigError(f"pruned.workloads: expected networks named {FAMILY}-..., found {name!r}")
    # The settings of a pruner stand in its own module, which needs torch: the job checks them.
    sections.known("pruned.workloads", "pruner", (options.get("pruner", "none"),), pruners.NAMES)


def cases(config):
    """The networks."""
    return config.pruned.workloads


def settings(config, case):
    """`Settings` of one network."""
    section = config.pruned
    own = section.settings.get(case, ({},))
    found = sections.taken(Settings, section, settings=own, modes=section.network_modes.get(case, section.modes))
    return sections.taken(Settings, found, modes=found.timed)


def sources(settings):
    """The checkpoints that a case reads; ``cached`` is one that was downloaded before."""
    return sorted({each["checkpoint"] for each in settings.settings if each.get("checkpoint", "cached") != "cached"})


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    _, options = networks.parse(case)
    pruner = options.get("pruner", "none")
    return [{"network": case, "pruner": pruner, "batching": name} for name in settings.batching]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    family, _ = networks.parse(row["network"])
    return [
        *(f"tilewright.{where}.{family}" for where in ("masks", "networks")),
        *(f"tilewright.networks.batching.{name}" for name in ("padded", row["batching"]) if name != UNPRUNED),
        f"tilewright.packed.pruners.{row['pruner']}",
        *(["tilewright.packed.pruners.none"] if row["batching"] == UNPRUNED else []),
        *devices.modules(device, "packed.executor"),
    ]


def size(case, settings):
    """Numbers that a case holds, see `networks.size`."""
    return 50 * networks.parse(case)[1]["image_size"] ** 2
