"""Neighbourhood attention of one layer: `tilewright.neighborhood` and what computes the same, by grid and window, and
the boxes of queries that it may choose (stage T5)."""

import re
from math import prod
from typing import Annotated, Literal, NamedTuple

import msgspec

from tilewright import devices, masks
from tilewright.core.errors import ConfigError
from tilewright.masks import neighborhood as family
from tilewright.neighborhood.rule import Rule
from tilewright_study import sections
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Flag, Number

TABLES = ("neighborhood", "neighborhood_boxes")
FIGURES = ("neighborhood", "neighborhood_boxes")

OURS = "tilewright"
# What else is timed; the last one attends to all tokens, which is another result.
CONTENDERS = ("gather", "flex", "natten", "sdpa_dense")
DENSE = "sdpa_dense"


class Values(sections.Section, frozen=True):
    """What all layers are run with.

    contenders: what is timed beside Tilewright, with the most tokens of a grid that it is run on
    boxes: how many boxes of queries are timed beside the chosen one, those that are predicted to be the fastest
    box_tokens: on grids of more tokens the chosen box alone is timed
    max_seconds: a timing stops after this time, in seconds
    """

    contenders: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    boxes: Annotated[int, msgspec.Meta(ge=0)]
    box_tokens: Annotated[int, msgspec.Meta(ge=0)]
    max_seconds: float


class Section(Values, frozen=True):
    """Neighbourhood attention of one layer.

    layers: "<grid>-w<window>-<heads>x<head_dim>", with -s<stride>, -d<dilation>, -causal<axes> and -cut behind the
        window as needed, as workloads of the family neighborhood have them
    """

    layers: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        sections.distinct("neighborhood.layers", self.layers)
        for case in self.layers:
            sections.at("neighborhood.layers", layer, case)
        sections.known("neighborhood.contenders", "contender", self.contenders, CONTENDERS)
        sections.above_zero("neighborhood.max_seconds", self.max_seconds)


class Settings(Values, frozen=True):
    """What one layer is run with."""


class Row(rows.Waited, frozen=True, kw_only=True):
    """A provider on one layer, of one image whose tokens lie row by row, in the layout that it takes.

    case: the layer, ``axes`` those of its grid. box: of queries, with how its keys are walked; chosen: whether it is
    what a call takes; predicted: the time predicted over that of the chosen one. plan_us: until a box is chosen, the
    first time. pairs, visited: pairs of a head that the result is made of, and that are computed, with padding.
    relative_error: of `checked_rows` queries drawn by the seed, the first and the last among them.
    """

    kind: Literal["neighborhood"] = "neighborhood"
    version: Literal[1] = 1
    case: str = ""
    grid: str = ""
    axes: Count = None
    window: str = ""
    tokens: Count = None
    heads: Count = None
    head_dim: Count = None
    provider: str = ""
    variant: str = ""
    box: str = ""
    chosen: Flag = None
    predicted: Number = None
    plan_us: Number = None
    pairs: Count = None
    visited: Count = None
    useful_gflops: Number = None


NAMED = "{case} {provider} {box}"


class Layer(NamedTuple):
    """What the name of a case says."""

    grid: tuple[int, ...]
    rule: Rule
    heads: int
    head_dim: int


def layer(case):
    """The `Layer` of a case. Raises `ConfigError`."""
    match = re.fullmatch(r"(.+)-(\d+)x(\d+)", case)
    stated = match and family.fields(f"neighborhood-{match[1]}")
    if not stated or not int(match[2]) or not int(match[3]):
        raise ConfigError(
            f"case {case!r}: expected <grid>-w<window>-<heads>x<head_dim>, such as 16x32x32-w11-4x64, or with "
            "-s<stride>, -d<dilation>, -causal<axes> and -cut behind the window"
        )
    _, params = masks.parse(f"neighborhood-{match[1]}")
    return Layer(tuple(params.grid), params.rule, int(match[2]), int(match[3]))


def cases(config):
    """The layers."""
    return list(config.neighborhood.layers)


def settings(config, case):
    """`Settings` of one layer."""
    return sections.taken(Settings, config.neighborhood)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"provider": name} for name in (OURS, *settings.contenders)]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    return devices.modules(device, "neighborhood.launch") if row["provider"] == OURS else []


def size(case, settings):
    """Numbers that a case holds: queries, keys, values and results, and what the largest contender makes of them."""
    found = layer(case)
    tokens = prod(found.grid)
    blocks = (tokens // 128) ** 2 if tokens <= settings.contenders.get("flex", 0) else 0
    return 8 * tokens * found.heads * found.head_dim + 4 * blocks


def compiles(settings):
    """Whether torch compiles something."""
    return "flex" in settings.contenders


def remark(row):
    """What the log says of a row that passed."""
    return f"{rows.microseconds(row)}, {row['useful_gflops']:,.0f} useful GFLOP/s"
