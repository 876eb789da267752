"""Whole networks, from images to logits, with each kind of attention (stage T5)."""

import math
from typing import Literal

from tilewright import devices, networks
from tilewright.attention import backends
from tilewright.attention.schedule.search import entered as searching
from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.networks import Plans, attentions, batching
from tilewright_study import sections
from tilewright_study.measure import rows as _rows
from tilewright_study.measure.rows import Count, Number

# Asked for names: rows without plans do not depend on it.
APART = ("tilewright.attention.schedule.search",)

TABLES = ("end_to_end", "network_plans")
FIGURES = ("end_to_end",)


class Settings(sections.Section, frozen=True):
    """What one network is run with.

    attention: batches that each kind of attention is timed with; one without batches is left out
    compiled: the same for networks that torch.compile has compiled
    plans: attention tilewright with other plans than its own; each is timed with the batches of tilewright
    max_seconds: a timing stops after this time, in seconds
    """

    attention: dict[str, tuple[int, ...]]
    compiled: dict[str, tuple[int, ...]]
    plans: tuple[Plans, ...]
    max_seconds: float


class Section(Settings, frozen=True):
    """Whole networks, run end to end.

    workloads: networks by name
    """

    workloads: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names, and for batches and a time out of range."""
        sections.distinct("networks.workloads", self.workloads)
        for name in self.workloads:
            sections.at("networks.workloads", networks.parse, name)
        known = (*attentions.NAMES, *batching.NAMES)
        sections.batches("networks.attention", "attention", self.attention, known)
        sections.batches("networks.compiled", "attention", self.compiled, known)
        sections.distinct("networks.plans", self.plans)
        for plans in self.plans:
            sections.at("networks.plans", plans.check)
        if Plans() in self.plans:
            raise ConfigError(
                "networks.plans: expected plans that differ from those of attention tilewright, found the same"
            )
        sections.above_zero("networks.max_seconds", self.max_seconds)
        if self.workloads and not any(self.attention.values()):
            raise ConfigError("networks.attention: expected a batch for at least one attention, found none")


class Row(_rows.Compared, frozen=True, kw_only=True):
    """A network with one attention and batch.

    resolution: pixels of a side of its images, of those that are no squares of one that has as many.
    reorder, solver, tiles: of its plans, blank where they are not chosen; compiled: by torch.compile;
    peak_bytes: the most that torch held of a GPU's memory in a call, weights and images included.
    relative_error: of an image's logits, over the spread of the oracle's; attention_error: `reference.relative_error`
    of the worst attention over a pattern, on its own queries, keys and values. Each has its tolerance. p50_us: until
    the logits are there; attention_us, rest_us: of it; gpu_us: as a CUDA graph.
    """

    kind: Literal["networks"] = "networks"
    version: Literal[2] = 2
    network: str = ""
    family: str = ""
    variant: str = ""
    resolution: Count = None
    attention: str = ""
    reorder: str = ""
    solver: str = ""
    tiles: str = ""
    compiled: bool = False
    batch: Count = None
    parameters: Count = None
    attention_error: Number = None
    attention_tolerance: Number = None
    largest_logit: Number = None
    same_top1: Number = None
    first_call_s: Number = None
    images_per_s: Number = None
    attention_us: Number = None
    rest_us: Number = None
    gpu_us: Number = None
    peak_bytes: Count = None


NAMED = "{network} {attention}, batch {batch}"


def cases(config):
    """The networks."""
    return config.networks.workloads


def settings(config, case):
    """`Settings` of one network."""
    section = config.networks
    sizes, compiled = ({n: b for n, b in each.items() if b} for each in (section.attention, section.compiled))
    plans = section.plans if "tilewright" in sizes else ()
    return sections.taken(Settings, section, attention=sizes, compiled=compiled, plans=plans)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    names = dict.fromkeys((*settings.attention, *settings.compiled))
    rows = [{"network": case, "attention": name} for name in names]
    return rows + [{"network": case, "attention": "tilewright", **columns(plans)} for plans in settings.plans]


def columns(plans):
    """What a row says of a network's `Plans`."""
    return {"reorder": plans.reorder, "solver": plans.solver, "tiles": " ".join(plans.tiles)}


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    family, options = networks.parse(row["network"])
    package = attentions if row["attention"] in attentions.NAMES else batching
    # The first of a package is the oracle.
    entered = [f"{package.__name__}.{name}" for name in (package.NAMES[0], row["attention"])]
    if package is attentions:
        # What a network is made with before it is given another.
        entered.append(f"{package.__name__}.native")
    if "pruner" in options:
        entered.append(f"tilewright.packed.pruners.{options['pruner']}")
    if package is batching:
        entered += devices.modules(device, "packed.executor")
    if row["attention"] == "tilewright":
        stated = {name: row[name] for name in ("reorder", "solver") if row.get(name)}
        plans = Plans(**stated)
        entered += [f"tilewright.attention.reorder.{plans.reorder}", *searching(plans.solver)]
        entered += devices.modules(device, *backends.PLANNING)
    return [f"tilewright.masks.{family}", f"tilewright.networks.{family}", *entered]


def size(case, settings):
    """Numbers that a case holds: its graphs are small beside its tokens' values."""
    # ASSUME: fifty numbers of 40 bytes for each pixel hold an image's features at the largest batch.
    return 50 * math.prod(sides.pair(networks.parse(case)[1]["image_size"]))


def side(size):
    """Pixels of a side of an image, or of the square that has as many as one of this height and width."""
    return round(math.prod(sides.pair(size)) ** 0.5)


def compiles(settings):
    """Whether an attention, or a whole network, is compiled."""
    return bool(settings.compiled) or any(name in attentions.COMPILED for name in settings.attention)


def remark(row):
    """What the log says of a row that passed."""
    share = f"{row['attention_us'] / row['p50_us']:.0%} of it attention, " if row.get("attention_us") else "compiled, "
    plans = [row[name] for name in ("reorder", "solver", "tiles") if row.get(name)]
    return f"{row['p50_us'] / 1e3:.1f} ms, {share}error {row['max_abs_error']:.1e}" + (
        f" (plans: {', '.join(plans)})" if plans else ""
    )
