"""What paths of networks cost on generated hardware, by a cost model (stage T5): no time is taken."""

from typing import Annotated, Literal

import msgspec

from tilewright import networks
from tilewright.core.errors import ConfigError, Unavailable
from tilewright_study import accelerators, sections
from tilewright_study.accelerators import hardware as generated
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("accelerator",)
FIGURES = ()

SECTION = "accelerators"
# Any host gives the same.
ON_HOST, TIMES = True, False
FAMILY = "segformer"
# What a row's device says.
DEVICE = "zigzag-dse {}, a cost model, uncalibrated"

Positive = Annotated[int, msgspec.Meta(ge=1)]
Sizes = tuple[Positive, ...]


class Values(sections.Section, frozen=True):
    """What all networks are run with.

    classes: that the networks tell apart
    vectors: input channels that a unit sums up in a cycle
    lanes: output channels
    elements: pixels of a cycle
    multipliers: the fewest and the most that hardware has; what has others is left out
    buffers: KiB for weights, inputs and outputs
    files: further hardware of the user's own, YAML with the fields of accelerators.hardware.Hardware
    loops: how many loops of a layer are arranged in every order
    """

    classes: Positive
    vectors: Sizes
    lanes: Sizes
    elements: Sizes
    multipliers: tuple[Positive, Positive]
    buffers: tuple[tuple[Positive, Positive, Positive], ...]
    files: tuple[str, ...]
    loops: Annotated[int, msgspec.Meta(ge=2, le=8)]


class Section(Values, frozen=True):
    """What paths cost on generated hardware, see tilewright_study.accelerators.

    networks: paths by network, none leaves it out; the first is the whole network, which ratios are of
    """

    networks: dict[str, tuple[str, ...]]

    def check(self, config):
        """Raise `ConfigError` for networks that have no such paths, and for hardware that cannot be made."""
        for name, paths in self.networks.items():
            _check_network(name)
            sections.distinct(f"accelerators.networks.{name}", paths)
        sections.at("accelerators", made, self)


class Settings(Values, frozen=True):
    """What one network is run with. paths: of it."""

    paths: tuple[str, ...]


class Row(rows.Judged, frozen=True, kw_only=True):
    """A path on one hardware.

    whole: whether it is the first path of its network. vector, lanes, elements, weights_kib, inputs_kib, outputs_kib:
    see `tilewright_study.accelerators.hardware.Hardware`. area_mm2: of that. macs: multiplications of the path;
    padded_macs: with those of channels and pixels that the hardware rounds up to. cycles, energy_uj: of its products;
    those of the decoder, of depthwise kernels and of attention's products stand beside. left_out_mb: bytes that norms,
    softmax, activations, sums and resizing read and write, which no cycle or energy counts. loops: see `Values`.
    """

    kind: Literal["accelerator"] = "accelerator"
    version: Literal[1] = 1
    network: str = ""
    path: str = ""
    whole: Count = None
    vector: Count = None
    lanes: Count = None
    elements: Count = None
    weights_kib: Count = None
    inputs_kib: Count = None
    outputs_kib: Count = None
    area_mm2: Number = None
    macs: Count = None
    padded_macs: Count = None
    cycles: Number = None
    energy_uj: Number = None
    decoder_cycles: Number = None
    decoder_uj: Number = None
    depthwise_cycles: Number = None
    depthwise_uj: Number = None
    attention_cycles: Number = None
    attention_uj: Number = None
    left_out_mb: Number = None
    loops: Count = None


NAMED = "{network} {path} on {vector}x{lanes}x{elements}, {weights_kib} KiB for weights"


def _check_network(name):
    family, _ = sections.at("accelerators.networks", networks.parse, name)
    if family != FAMILY:
        raise ConfigError(f"accelerators.networks: expected networks named {FAMILY}-..., found {name!r}")


def made(stated):
    """All hardware of a section or of settings. Raises `ConfigError` and `ArtifactError`."""
    widths = stated.vectors, stated.lanes, stated.elements
    found = generated.generated(*widths, stated.buffers, stated.multipliers)
    return [*found, *map(generated.read, stated.files)]


def cases(config):
    """The networks that have paths."""
    return [name for name, paths in config.accelerators.networks.items() if paths]


def settings(config, case):
    """`Settings` of one network."""
    return sections.taken(Settings, config.accelerators, paths=config.accelerators.networks[case])


def sources(settings):
    """The user's own hardware."""
    return list(settings.files)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"network": case}]


def modules(row, device):
    """Modules that a row depends on, see `experiments`."""
    own = [f"tilewright_study.accelerators.{name}" for name in ("workloads", "_worker")]
    return [*own, f"tilewright.masks.{FAMILY}", "tilewright_study.planning.layers"]


def run(case, settings, how):
    """Yield the rows of the network `case`; one that says why where the cost model is not there.

    Raises `TilewrightError`.
    """
    from tilewright_study.accelerators import workloads

    _check_network(case)
    known = {"network": case, "loops": settings.loops}
    paths = [(text, *workloads.layers_of(case, text, settings.classes)) for text in settings.paths]
    try:
        known["device"] = DEVICE.format(accelerators.version())
    except Unavailable as reason:
        device = DEVICE.format("").replace(" ,", ",")
        yield known | {"device": device, "status": "skipped", "reason": str(reason), "time": rows.now()}
        return
    for chosen in made(settings):
        parts = {text: workloads.shapes(found, chosen) for text, _, _, found in paths}
        shapes = {shape for own in parts.values() for counted in own.values() for shape in counted}
        costs = accelerators.costs(chosen, shapes, settings.loops)
        for place, (text, options, path, found) in enumerate(paths):
            yield {
                **known,
                **{"path": text, "whole": int(place == 0), "time": rows.now()},
                **msgspec.structs.asdict(chosen),
                **{"area_mm2": chosen.area_mm2, "macs": sum(layer.macs for layer in found)},
                **{"padded_macs": workloads.products(parts[text])},
                **_summed(parts[text], costs),
                **{"left_out_mb": workloads.left_out(options, path) / 1e6},
            }


def _summed(parts, costs):
    """Columns of cycles and energy: of all, and of parts by their names."""
    found = {}
    for part, counted in parts.items():
        found[f"{part}_cycles"] = sum(count * costs[shape].cycles for shape, count in counted.items())
        found[f"{part}_uj"] = sum(count * costs[shape].pj for shape, count in counted.items()) / 1e6
    total = {
        f"{what}": sum(x for name, x in found.items() if name.endswith(f"_{unit}"))
        for what, unit in (("cycles", "cycles"), ("energy_uj", "uj"))
    }
    return total | {name: x for name, x in found.items() if name in Row.__struct_fields__}


def remark(row):
    """What the log says of a row that has costs."""
    return f"{row['cycles'] / 1e6:.2f} million cycles, cost model"
