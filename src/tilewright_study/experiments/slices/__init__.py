"""Attention by slice lists at set sparsities, beside dense attention and lists of blocks, and the time that choosing
takes (stage T5)."""

import re
from itertools import product
from typing import Literal

from tilewright import devices
from tilewright.attention.blocks import tiles
from tilewright.core.errors import ConfigError
from tilewright.slices import predictors
from tilewright_study import sections
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("slices",)
FIGURES = ("slices_speedup",)

# Dense attention, and attention by lists of whole blocks.
BASELINES = (*sparse_baselines.DENSE, *sparse_baselines.BLOCKS)
# Orders of the tokens (`slices.orders`).
ORDERS = ("raster", "voxel", "hilbert")
# Who chooses by the exact shares of attention.
ORACLE = "oracle"
# Single keys for groups of 128 queries, what the lists of predictors are.
SLICE = "128x1"
# Cases of networks whose attention is over a video's tokens and those of a text, before or behind them (see `sizes`):
# CogVideoX of 49 frames of 480p, HunyuanVideo of 129 of 720p.
MODELS = {
    "cogvideox-2b": "30x64-226-13x30x45",
    "cogvideox-5b": "48x64-226-13x30x45",
    "hunyuan": "24x128-33x45x80-256",
}
_CASE = re.compile(r"(\d+)x(\d+)-(?:(\d+)-)?(\d+)x(\d+)x(\d+)(?:-(\d+))?")
# By predictor: settings of `slices.predict`, the predictor's name among them as ``by``.
Predictors = dict[str, dict[str, int | float | str]]


class Lists(sections.Section, frozen=True):
    """Slice lists, and what they are compared with.

    groups: shapes of groups, queries x keys listed together, whose lists the oracle chooses, 128x1 among them
    predictors: by a name of one's own, arguments of `slices.predict`, such as by and pool
    baselines: dense attention; flex, fa4, flashinfer and cudnn_blocks by lists of groups that are blocks of theirs
    max_seconds: a timing stops after this time, in seconds
    """

    groups: tuple[str, ...]
    predictors: Predictors
    baselines: tuple[str, ...]
    max_seconds: float


class Settings(Lists, frozen=True):
    """What one case is run with.

    order: the order of the tokens
    sparsities: shares of the keys that lists leave out
    """

    order: str
    sparsities: tuple[float, ...]


class Section(Settings, frozen=True):
    """Attention by slice lists at set sparsities.

    shapes: pairs of heads and the dimension of a head
    grids: frames, rows and columns of a video's tokens
    joint: further cases, with tokens of text: cogvideox-2b, cogvideox-5b, hunyuan, or the sizes of one's own
    """

    shapes: tuple[tuple[int, int], ...]
    grids: tuple[tuple[int, int, int], ...]
    joint: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        check_maps("slices", self)
        sections.known("slices.order", "order of tokens", (self.order,), ORDERS)
        sections.selection("slices.sparsities", self.sparsities)
        for sparsity in self.sparsities:
            if not 0 < sparsity < 1:
                raise ConfigError(f"slices.sparsities: expected shares between 0 and 1, found {sparsity}")
        for name in self.baselines:
            known = sparse_baselines.BLOCKS.get(name, self.groups)
            if not set(known) & set(self.groups):
                raise ConfigError(f"slices.groups: the baseline {name} needs {' or '.join(known)}")


class Shown(rows.Waited, frozen=True, kw_only=True):
    """A call by lists.

    maps: where queries and keys come from. grid: with tokens of text before or behind it, see `sizes`. token_order: of
    the video's tokens. call: ``attend`` (lists given), ``predict`` (lists made) or ``predict_attend``. group: queries x
    keys of a list, as tiles are called; keep, mass: what the lists were chosen by, ``oracle`` by the exact shares of
    attention. What follows is of the lists: density, the share of keys kept, least_density and most_density of a head;
    recall, the mean share of attention kept, least_recall of a head; in float32, against dense attention: l1_error, sum
    of errors over that of absolute values, cosine, largest_error, and error_bound, which no error can exceed.
    max_abs_error, relative_error, checked_rows: of the timed call, against attention in float64 over the same lists;
    contenders are timed in turns. useful_gflops: of the pairs that the lists keep.
    """

    maps: str = ""
    heads: Count = None
    head_dim: Count = None
    grid: str = ""
    tokens: Count = None
    token_order: str = ""
    provider: str = ""
    call: str = ""
    group: str = ""
    chosen_by: str = ""
    keep: Number = None
    mass: Number = None
    density: Number = None
    least_density: Number = None
    most_density: Number = None
    recall: Number = None
    least_recall: Number = None
    l1_error: Number = None
    cosine: Number = None
    largest_error: Number = None
    error_bound: Number = None
    useful_gflops: Number = None


class Row(Shown, frozen=True, kw_only=True):
    """A call on one planted video. sparsity: asked for."""

    kind: Literal["slices"] = "slices"
    version: Literal[1] = 1
    sparsity: Number = None


NAMED = "{provider} {call}, {chosen_by} {group}, sparsity {sparsity}"


def check_maps(place, section):
    """Raise `ConfigError` for what the sections `slices` and `recall` have in common."""
    sections.distinct(f"{place}.shapes", section.shapes)
    sections.at_least(f"{place}.shapes", 1, [number for shape in section.shapes for number in shape])
    sections.distinct(f"{place}.grids", section.grids)
    sections.at_least(f"{place}.grids", 1, [number for grid in section.grids for number in grid])
    sections.distinct(f"{place}.joint", section.joint)
    for case in section.joint:
        sections.at(f"{place}.joint", sizes, case)
    sections.distinct(f"{place}.groups", section.groups)
    for name in section.groups:
        sections.at(f"{place}.groups", tiles.parse, name)
    if SLICE not in section.groups:
        raise ConfigError(f"{place}.groups: expected {SLICE} among them, found {', '.join(section.groups) or 'none'}")
    for name, setting in section.predictors.items():
        _, by = sections.at(f"{place}.predictors.{name}", split, setting)
        sections.at(f"{place}.predictors.{name}", predictors.parse, *by)
    sections.distinct(f"{place}.baselines", section.baselines)
    sections.known(f"{place}.baselines", "baseline", section.baselines, BASELINES)
    sections.above_zero(f"{place}.max_seconds", section.max_seconds)


def split(setting):
    """``(shape, (by, settings))`` of the arguments of `slices.predict`: those of all predictors, and its own."""
    shape = {name: setting[name] for name in ("rows", "width") if name in setting}
    own = {name: value for name, value in setting.items() if name not in ("by", "rows", "width")}
    return shape, (setting.get("by", "pooled"), own)


def case_names(section):
    """``<heads>x<head_dim>-<frames>x<rows>x<columns>`` for each shape and grid, and those that are named."""
    pairs = product(section.shapes, section.grids)
    return [*("-".join("x".join(map(str, sizes)) for sizes in pair) for pair in pairs), *section.joint]


def sizes(case):
    """``(heads, head_dim, grid)`` of a case: one of `MODELS`, or stated by its name. Raises `ConfigError`."""
    heads, head_dim, _, *grid, _ = _numbers(case)
    return heads, head_dim, tuple(grid)


def text(case):
    """Tokens of text before and behind those of the grid of a case. Raises `ConfigError`."""
    _, _, first, _, _, _, last = _numbers(case)
    return first, last


def _numbers(case):
    match = _CASE.fullmatch(MODELS.get(case, case))
    if match is None or any(n and not int(n) for n in match.groups()):
        raise ConfigError(
            f"case {case!r}: expected <heads>x<head_dim>-<frames>x<rows>x<columns>, such as 2x64-9x20x26, with <text>- "
            f"before the frames or -<text> at the end, or one of {', '.join(MODELS)}"
        )
    return [int(n or 0) for n in match.groups()]


def cases(config):
    """Every shape on every grid."""
    return case_names(config.slices)


def settings(config, case):
    """`Settings` of one case."""
    return sections.taken(Settings, config.slices)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"provider": name, "chosen_by": ""} for name in ("tilewright", *settings.baselines)]


def named(settings, device):
    """The modules of the predictors."""
    return [f"tilewright.slices.predictors.{split(stated)[1][0]}" for stated in settings.predictors.values()]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`. Those of all predictors: a row has a name of the
    user's."""
    provider = row.get("provider", "")
    peer = [f"tilewright_study.baselines.sparse.{provider}"] if provider not in ("", "tilewright", "flex") else []
    chosen = row.get("chosen_by", "") not in ("", ORACLE)
    by = [f"tilewright.slices.predictors.{name}" for name in predictors.NAMES] if chosen else []
    return [*devices.modules(device, "slices.executor", "slices.selection"), *peer, *by]


def size(case, settings):
    """Numbers that a case holds: the exact shares of groups, ranked and as flags."""
    heads, _, grid = sizes(case)
    tokens = grid[0] * grid[1] * grid[2] + sum(text(case))
    return 4 * heads * tokens * -(-tokens // 128)


def compiles(settings):
    """Whether torch compiles something."""
    return "flex" in settings.baselines


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['p50_us']:,.1f} us, {row['density']:.1%} of the keys, recall {row['recall']:.3f}"
