"""What a whole network gains at its size, called as people call it: from Python, compiled, by reduce-overhead, and as a
CUDA graph that was captured by hand (stage T5)."""

from typing import Annotated, Literal

import msgspec

from tilewright import devices, networks
from tilewright.attention import backends
from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.networks import attentions, batching
from tilewright_study import sections
from tilewright_study.experiments import networks as _networks
from tilewright_study.measure import rows as _rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("gains",)
FIGURES = ()

# Names of timm's networks, such as ``timm-vit_base_patch16_224-512``.
TIMM = "timm"
# Ways of calling. Those of `COMPILED` are torch.compile's.
EAGER, COMPILE, REDUCE, GRAPH = WAYS = ("eager", "compile", "reduce-overhead", "graph")
COMPILED = (COMPILE, REDUCE)
# Tilewright's forms: of attention, and of a pruned DeiT's batches.
OURS = ("tilewright", "ragged")
# Forms of timm's networks: sparse, with the mask of its pattern, and as timm has it, to all keys.
TIMM_FORMS = ("tilewright", "dense", "full")


class Settings(sections.Section, frozen=True):
    """What one network is run with.

    forms: ways of calling that each form of a network is timed in, by what computes its attention, or for a pruned DeiT
        by its batching
    batches: images at a time
    window: side of the windows of timm's networks, in tokens; a smaller grid has the largest odd one that fits
    max_seconds: a timing stops after this time, in seconds
    """

    forms: dict[str, tuple[Literal[WAYS], ...]]
    batches: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    window: Annotated[int, msgspec.Meta(ge=1)]
    max_seconds: float


class Section(sections.Section, frozen=True):
    """What whole networks gain at their size, in each way of calling.

    workloads: networks by name; timm-<model>-<pixels> is one of timm's
    forms: for each family, or timm, ways of calling that each form of its networks is timed in
    batches: images at a time
    window: side of the windows of timm's networks, in tokens; a smaller grid has the largest odd one that fits
    max_seconds: a timing stops after this time, in seconds
    """

    workloads: tuple[str, ...]
    forms: dict[str, dict[str, tuple[Literal[WAYS], ...]]]
    batches: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    window: Annotated[int, msgspec.Meta(ge=1)]
    max_seconds: float

    def check(self, config):
        """Raise `ConfigError` for unknown names, and for numbers out of range."""
        sections.distinct("gains.workloads", self.workloads)
        sections.distinct("gains.batches", self.batches)
        families = {sections.at("gains.workloads", parse, name)[0] for name in self.workloads}
        sections.known("gains.forms", "family", self.forms, (TIMM, *networks.NAMES))
        for family in sorted(families):
            forms = self.forms.get(family, {})
            sections.known(f"gains.forms.{family}", "form", forms, known(family))
            if not any(form in OURS for form in forms) or len(forms) < 2:
                names = ", ".join(forms) or "none"
                raise ConfigError(f"gains.forms.{family}: expected {' or '.join(OURS)} and another form, found {names}")
        if self.window % 2 == 0:
            raise ConfigError(f"gains.window: expected an odd number of tokens, found {self.window}")
        sections.above_zero("gains.max_seconds", self.max_seconds)


class Row(_rows.Compared, frozen=True, kw_only=True):
    """A network in one form, batch and way of calling.

    resolution: as in `networks`; form: what computes its attention, or the batching of a pruned DeiT; pattern: of
    timm's networks; way: of calling. relative_error: of an image's logits, over the spread of the oracle's, of the same
    way of calling; first_call_s: until that way gave its first logits. p50_us: until the logits are there.
    """

    kind: Literal["gains"] = "gains"
    version: Literal[1] = 1
    network: str = ""
    family: str = ""
    resolution: Count = None
    pattern: str = ""
    form: str = ""
    way: str = ""
    batch: Count = None
    parameters: Count = None
    largest_logit: Number = None
    first_call_s: Number = None


NAMED = "{network} {form}, batch {batch}, {way}"


def parse(name):
    """``(family, options)`` of a network, as `networks.parse`; timm's have the options ``variant`` and ``image_size``.

    Raises `UnknownNameError`, and `ConfigError` for a name of timm's without pixels.
    """
    if not name.startswith(f"{TIMM}-"):
        return networks.parse(name)
    variant, _, size = name.removeprefix(f"{TIMM}-").rpartition("-")
    if not variant or not size.isdecimal() or not int(size):
        raise ConfigError(f"expected {TIMM}-<model>-<pixels>, found {name!r}")
    return TIMM, {"variant": variant, "image_size": int(size)}


def known(family):
    """Names of the forms of a family, as `networks.exchanged`, which loads torch."""
    if family == TIMM:
        return TIMM_FORMS
    return batching.NAMES if family == "deit" else attentions.NAMES


def cases(config):
    """The networks."""
    return config.gains.workloads


def settings(config, case):
    """`Settings` of one network."""
    forms = {form: ways for form, ways in config.gains.forms[parse(case)[0]].items() if ways}
    return sections.taken(Settings, config.gains, forms=forms)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"network": case, "form": form} for form in settings.forms]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    own = ["tilewright_study.experiments.networks.run"]
    if parse(row["network"])[0] != TIMM:
        return [*own, *_networks.modules({"network": row["network"], "attention": row["form"]}, device)]
    planning = devices.modules(device, *backends.PLANNING) if row["form"] in OURS else []
    return [*own, "tilewright.nn.patterns", "tilewright.integrations.timm", *planning]


def size(case, settings):
    """Numbers that a case holds, see `networks.size`."""
    height, width = sides.pair(parse(case)[1]["image_size"])
    return 50 * height * width


def compiles(settings):
    """Whether a way of calling, or a form, is compiled."""
    ways = {way for each in settings.forms.values() for way in each}
    return bool(ways & set(COMPILED)) or any(form in attentions.COMPILED for form in settings.forms)


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['p50_us'] / 1e3:.2f} ms, error {row['relative_error']:.1e}"
