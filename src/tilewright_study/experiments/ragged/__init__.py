"""Attention of packed images, and the calls that pack them (stage T5)."""

from typing import Literal

from tilewright import devices
from tilewright.core.errors import ConfigError
from tilewright_study import sections
from tilewright_study.baselines import packed as packed_baselines
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Flag, Number

TABLES = ("ragged",)
FIGURES = ("ragged_kernel",)

OURS = "tilewright"
PROVIDERS = (OURS, *packed_baselines.NAMES)


class Settings(sections.Section, frozen=True):
    """What one shape is run with.

    lengths: pairs (low, high); the tokens of an image are drawn uniformly from them
    attention: for each provider, ours and its baselines, the numbers of images it is timed with; none leaves it out
    max_seconds: a timing stops after this time, in seconds
    """

    lengths: tuple[tuple[int, int], ...]
    attention: dict[str, tuple[int, ...]]
    max_seconds: float


class Section(Settings, frozen=True):
    """Attention of packed images.

    shapes: pairs of heads and the dimension of a head
    shape_lengths: those of a shape that has its own, by "<heads>x<head_dim>"
    dtype: of tokens and weights; null is that of the study
    """

    shapes: tuple[tuple[int, int], ...]
    shape_lengths: dict[str, tuple[tuple[int, int], ...]]
    dtype: sections.Dtype | None

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        sections.distinct("ragged.shapes", self.shapes)
        sections.at_least("ragged.shapes", 1, [number for shape in self.shapes for number in shape])
        check_lengths("ragged.lengths", self.lengths)
        for shape, lengths in self.shape_lengths.items():
            sections.known("ragged.shape_lengths", "shape", (shape,), [_named(*each) for each in self.shapes])
            check_lengths(f"ragged.shape_lengths.{shape}", lengths)
        sections.batches("ragged.attention", "attention", self.attention, PROVIDERS)
        sections.above_zero("ragged.max_seconds", self.max_seconds)
        if self.shapes and not any(self.attention.values()):
            raise ConfigError("ragged.attention: expected a number of images for at least one provider, found none")


class Row(rows.Waited, frozen=True, kw_only=True):
    """A call on one packed batch.

    call: ``attend``, ``attend_into`` (given memory) or one of `run.MOVES`. exact: whether a provider computes this
    batch's attention; otherwise it is a bound, compared with attention over padding, too. relative_error: see
    `reference.relative_error`. A GPU is timed with a warm second-level cache. host_us: of a prepared call.
    byte_floor_us: q, k, v and the result moved once at the bandwidth of a copy; floor_fraction: of p50_us; both blank
    on CPUs.
    """

    kind: Literal["ragged"] = "ragged"
    version: Literal[1] = 1
    heads: Count = None
    head_dim: Count = None
    lengths: str = ""
    images: Count = None
    tokens: Count = None
    longest: Count = None
    provider: str = ""
    call: str = ""
    exact: Flag = None
    useful_gflops: Number = None
    byte_floor_us: Number = None
    floor_fraction: Number = None


NAMED = "{provider} {call}, {images} images of {lengths}"


def check_lengths(place, lengths):
    """Raise `ConfigError` unless each of `lengths` is a pair of numbers of tokens, the least first."""
    sections.selection(place, lengths)
    for low, high in lengths:
        sections.at_least(place, 1, [low])
        if low > high:
            raise ConfigError(f"{place}: expected the least first, found [{low}, {high}]")


def cases(config):
    """``<heads>x<head_dim>`` for each shape."""
    return [_named(*shape) for shape in config.ragged.shapes]


def settings(config, case):
    """`Settings` of one shape."""
    section = config.ragged
    sizes = {name: images for name, images in section.attention.items() if images}
    lengths = section.shape_lengths.get(case, section.lengths)
    return sections.taken(Settings, section, lengths=lengths, attention=sizes)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"provider": name} for name in settings.attention]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    peer = [] if row["provider"] == OURS else [f"tilewright_study.baselines.packed.{row['provider']}"]
    return [*devices.modules(device, "packed.executor"), *peer]


def size(case, settings):
    """Numbers that a case holds: the values of its largest batch."""
    heads, head_dim = shape(case)
    images = max(max(sizes) for sizes in settings.attention.values())
    return images * max(high for _, high in settings.lengths) * heads * head_dim


def _named(heads, head_dim):
    return f"{heads}x{head_dim}"


def shape(case):
    """``(heads, head_dim)`` of a case. Raises `ConfigError`."""
    heads, _, head_dim = case.partition("x")
    if not (heads.isdecimal() and head_dim.isdecimal() and int(heads) and int(head_dim)):
        raise ConfigError(f"case {case!r}: expected <heads>x<head_dim>, such as 3x64")
    return int(heads), int(head_dim)
