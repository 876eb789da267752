"""Execution paths of one network: which parts of it an image runs through, with the weights as they are.

A network that takes paths has ``forward(images, path, stages=None)``, see `Stages`, and `map_operators.Options`.
"""

import itertools
import numbers
import re
from typing import TYPE_CHECKING

import msgspec

from tilewright.core import arguments
from tilewright.core.errors import ConfigError

if TYPE_CHECKING:
    from tilewright.networks.map_operators import Options

LEVELS = "1234"
DECODERS = ("folded", "published")
# Channels come in multiples of this. ASSUME: what tensor cores and vectors like; the paper names no number.
CHANNELS = 16
_KNOBS = {"levels": str, "scale": float, "decoder": str, "fuse": int, "width": int}


class Path(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One path.

    blocks: for each stage as many 0s and 1s as it has blocks; those at 0 are skipped, tokens stay as they are. levels:
    which stages' maps the decoder sums up; stages behind the last are left out. scale: the input is resized to this
    share of its sides, and the maps back to the whole grid. decoder: `DECODERS`, which give the same maps.
    fuse, width: of the published decoder, how many channels it keeps of each level and of the fused map, None for all.
    Raises `ConfigError` for what no network has.
    """

    blocks: tuple[str, ...]
    levels: str = LEVELS
    scale: float = 1.0
    decoder: str = DECODERS[0]
    fuse: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        stages = arguments.each(self.blocks) or ()
        if not stages or not all(isinstance(stage, str) and re.fullmatch("[01]+", stage) for stage in stages):
            raise ConfigError(f"path: expected blocks of each stage as 0s and 1s, found {arguments.shown(self.blocks)}")
        arguments.of_kind(str, "a text", levels=self.levels, decoder=self.decoder)
        if not self.levels or self.levels != "".join(level for level in LEVELS if level in self.levels):
            raise ConfigError(f"path: expected levels of {LEVELS}, at least one and in order, found {self.levels!r}")
        if isinstance(self.scale, bool) or not isinstance(self.scale, numbers.Real) or not 0 < self.scale <= 1:
            raise ConfigError(f"path: expected a scale above 0 and at most 1, found {arguments.shown(self.scale)}")
        if self.decoder not in DECODERS:
            raise ConfigError(f"path: expected a decoder of {', '.join(DECODERS)}, found {self.decoder!r}")
        for knob in ("fuse", "width"):
            kept = getattr(self, knob)
            if kept is None:
                continue
            if self.decoder == "folded":
                raise ConfigError(f"path: the folded decoder takes no {knob}")
            whole = isinstance(kept, numbers.Integral) and not isinstance(kept, bool)
            if not whole or kept < CHANNELS or kept % CHANNELS:
                found = arguments.shown(kept)
                raise ConfigError(f"path: expected {knob} of a multiple of {CHANNELS} channels, found {found}")

    @classmethod
    def full(cls, options: "Options") -> "Path":
        """The path of a network that leaves nothing out."""
        return cls(tuple("1" * depth for depth in options.depths), decoder=options.decoder)

    @property
    def last(self) -> int:
        """Number of the last stage that runs, from 1."""
        return int(self.levels[-1])

    def __str__(self) -> str:
        knobs = {knob: str(getattr(self, knob)).removesuffix(".0") for knob in _KNOBS}
        return " ".join((".".join(self.blocks), *(f"{knob}={x}" for knob, x in knobs.items() if x != "None")))


class Stages:
    """What stages gave for one batch of images, by the path that ran last: `forward(images, path, stages=stages)` of
    the next one takes what it begins with from here.

    One network and one batch; in the order of scale and blocks paths run hardly more than the stages that differ.
    """

    def __init__(self):
        self._path, self._given = None, []

    def begun(self, path: Path) -> list:
        """A list of what the first stages gave, as many as `path` begins with: of the same blocks and size."""
        if self._path is None or self._path.scale != path.scale:
            return []
        pairs = zip(self._path.blocks[: len(self._given)], path.blocks[: path.last], strict=False)
        return self._given[: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))]

    def keep(self, path: Path, given: list) -> None:
        """Remember what each stage that `path` runs gave."""
        self._path, self._given = path, given


def parse(text: str, options: "Options") -> Path:
    """The `Path` of a network that `text` states, such as ``3.1011.110111.110 levels=1234 scale=0.75``.

    As many 0s and 1s as a stage has blocks say which are kept, any other number how many, from the front. What is not
    stated is that of `Path.full`. Raises `ConfigError`.
    """
    first, *knobs = text.split() or [""]
    stages = first.split(".")
    _check_stages(len(stages), options)
    fields = {}
    for knob in knobs:
        key, _, value = knob.partition("=")
        if key not in _KNOBS:
            raise ConfigError(f"path {text!r}: unknown key {key!r}; known: {', '.join(_KNOBS)}")
        if key in fields:
            raise ConfigError(f"path {text!r}: expected each key once, found {key!r} again")
        try:
            fields[key] = _KNOBS[key](value)
        except ValueError:
            raise ConfigError(f"path {text!r}: expected a number for {key}, found {value!r}") from None
    blocks = tuple(_bits(stage, depth, text) for stage, depth in zip(stages, options.depths, strict=True))
    return checked(Path(blocks, **{"decoder": options.decoder, **fields}), options)


def checked(path: Path, options: "Options") -> Path:
    """`path`, where the network of `options` has it; raises `ConfigError` otherwise."""
    if not isinstance(path, Path):
        raise ConfigError(f"path: expected a Path or its text, found {arguments.shown(path)}")
    _check_stages(len(path.blocks), options)
    for number, (stage, depth) in enumerate(zip(path.blocks, options.depths, strict=True), 1):
        if len(stage) != depth:
            raise ConfigError(f"path: expected {depth} blocks in stage {number}, found {len(stage)}: {stage}")
    usual = {"levels": LEVELS, "scale": 1.0, "decoder": options.decoder}
    for knob in _KNOBS:
        value = getattr(path, knob)
        if value != usual.get(knob) and knob not in options.knobs:
            raise ConfigError(f"path: this network takes no {knob}={value}; its keys: {', '.join(options.knobs)}")
        if knob in ("fuse", "width") and value is not None and value > options.channels:
            raise ConfigError(f"path: expected {knob} of at most {options.channels} channels, found {value}")
    if min(scaled(options.pixels, path.scale)) < options.least:
        height, width = scaled(options.pixels, path.scale)
        raise ConfigError(
            f"path: expected at least {options.least} pixels a side, found {height}x{width} at scale {path.scale}"
        )
    return path


class Routed:
    """A network that takes paths, by its options; ``_full`` is the path that leaves nothing out."""

    options: "Options"
    _full: Path

    def path(self, path: Path | str | None = None) -> Path:
        """A `Path` of this network, of its text or None for everything. Raises `ConfigError`."""
        if path is None:
            return self._full
        return parse(path, self.options) if isinstance(path, str) else checked(path, self.options)


def scaled(pixels: tuple[int, int], scale: float) -> tuple:
    """Height and width of images of ``(height, width)`` pixels at a scale."""
    return tuple(int(side * scale + 0.5) for side in pixels)


def _check_stages(found, options):
    if found != len(options.depths):
        expected = ".".join(map(str, options.depths))
        raise ConfigError(f"path: expected {len(options.depths)} stages, of at most {expected} blocks, found {found}")


def _bits(stage, depth, text):
    """Blocks of a stage as 0s and 1s."""
    if len(stage) == depth and set(stage) <= {"0", "1"}:
        return stage
    if not re.fullmatch("[0-9]+", stage) or int(stage) > depth:
        raise ConfigError(
            f"path {text!r}: expected {depth} 0s and 1s, or how many of {depth} blocks are kept, found {stage!r}"
        )
    return "1" * int(stage) + "0" * (depth - int(stage))
