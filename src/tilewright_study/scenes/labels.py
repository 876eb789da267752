"""Classes of label maps, their colours, and where the files of data are: a record, in memory or in a small file."""

import json
import re
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tilewright.core import contents
from tilewright.core.errors import ArtifactError

# Names of the file in a folder of data, the first that is there.
FILES = ("data.toml", "data.json")
# Classes that label maps have numbers for: one more value says that a pixel has no label.
MOST = 255
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
Colour = tuple[Byte, Byte, Byte]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Split = Literal["train", "val", "fit", "choice", "test"]


class Labels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """classes: names of the labels 0, 1, …. palette: red, green and blue of each; where it is empty, those of VOC."""

    classes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    palette: tuple[Colour, ...] = ()

    def __post_init__(self) -> None:
        # msgspec turns a `ValueError` into an error of the place in a file.
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes: expected each name once, found {_twice(self.classes)!r} again")
        if self.palette and len(self.palette) != len(self.classes):
            raise ValueError(
                f"palette: expected a colour for each of {len(self.classes)} classes, found {len(self.palette)}"
            )

    @cached_property
    def colours(self) -> np.ndarray:
        """uint8 [256, 3]: of each value of a label map, those behind the classes in VOC's colours."""
        found = voc_colours()
        if self.palette:
            found[: len(self.palette)] = self.palette
        return found


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of images in each split, all in all 1."""

    train: Share = 0.6
    fit: Share = 0.1
    choice: Share = 0.1
    test: Share = 0.2

    def __post_init__(self) -> None:
        if abs(sum(msgspec.structs.astuple(self)) - 1) > 1e-6:
            raise ValueError(f"shares: expected a sum of 1, found {sum(msgspec.structs.astuple(self)):g}")


class Data(Labels, frozen=True, forbid_unknown_fields=True, dict=True):
    """Where the images and label maps of a folder are, and what they hold.

    images, labels: places of files in the folder, with ``{name}``, which an image shares with its label map, and of
    labels where each class has a file of its own ``{class}``; with ``{split}`` where folders are splits. Without an
    ending any is read. pixels: what label maps hold, ``values`` (gray or palette) or ``colours``, those of `palette`.
    values: of each class, where they are not 0, 1, …. ignore, ignore_colours: pixels that have no label. background:
    the class of pixels that are in no class's file; without it they have no label. Of several the last class counts.
    lists: a text file of each split with a name on each line, with ``{split}``. splits: the text for ``{split}`` by
    split, where it is another. group: a regular expression; images whose names match it in the same text are in one
    split, as frames of a video should be. shares, seed: how images are split where there is no ``{split}``.
    """

    images: str = "images/{name}"
    labels: str = "labels/{name}"
    pixels: Literal["values", "colours"] = "values"
    values: tuple[Byte, ...] = ()
    ignore: tuple[Byte, ...] = (255,)
    ignore_colours: tuple[Colour, ...] = ()
    background: str = ""
    lists: str = ""
    splits: dict[Split, str] = msgspec.field(default_factory=dict)
    group: str = ""
    shares: Shares = Shares()
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("images", {"name", "split"}),
            ("labels", {"name", "split", "class"}),
            ("lists", {"split"}),
        ):
            text, needed = getattr(self, name), "split" if name == "lists" else "name"
            stated = re.findall(r"\{(.*?)\}", text)
            if (text or name != "lists") and (stated.count(needed) != 1 or {*stated} - known):
                others = ", ".join(sorted(known))
                raise ValueError(f"{name}: expected {{{needed}}} once and of others only {others}, found {text!r}")
        if ("{split}" in self.images) != ("{split}" in self.labels) or (self.lists and "{split}" in self.images):
            found = f"{self.images}, {self.labels}, {self.lists}"
            raise ValueError(f"places: expected {{split}} in images and labels, in lists, or in none, found {found}")
        if self.pixels == "colours" and (not self.palette or self.by_class):
            raise ValueError("pixels: expected a palette and one file of labels for colours, found another")
        if self.values and len(set(self.values)) != len(self.classes):
            raise ValueError(f"values: expected one for each of {len(self.classes)} classes, found {len(self.values)}")
        if self.background and (self.background not in self.classes or not self.by_class):
            raise ValueError(f"background: expected a class, and {{class}} in labels, found {self.background!r}")
        for name, kept, ignored in (("values", self.known, self.ignore), self._colours):
            if len({*kept, *ignored}) < len(kept) + len({*ignored}):
                found = _twice((*kept, *dict.fromkeys(ignored)))
                raise ValueError(f"{name}: expected each of one class, or to be ignored, found {found} again")
        try:
            re.compile(self.group)
        except re.error as error:
            raise ValueError(f"group: expected a regular expression, found {self.group!r}: {error}") from None

    @property
    def by_class(self) -> bool:
        """Whether each class has a file of its own."""
        return "{class}" in self.labels

    @property
    def known(self) -> tuple[int, ...]:
        """The value of each class."""
        return self.values or tuple(range(len(self.classes)))

    @property
    def _colours(self):
        return ("palette", self.palette, self.ignore_colours) if self.pixels == "colours" else ("palette", (), ())


def read(path: Path | str) -> Data:
    """What a file in TOML or JSON states of data, or one of `FILES` in a folder. Raises `ArtifactError`."""
    path = found(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected classes in TOML or JSON, such as {FILES[0]}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: expected classes in TOML or JSON, found: {error}") from error
    return contents.fields(path, "data", document, Data)


def made(path: Path | str, **fields: Any) -> Data:
    """`Data` of these fields, some of which a file states. Raises `ArtifactError`, which names it."""
    try:
        return Data(**fields)
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from None


def found(path: Path | str) -> Path:
    """The file of a folder, or the path itself. Raises `ArtifactError` for a folder without one."""
    path = Path(path)
    if not path.is_dir():
        return path
    there = [path / name for name in FILES if (path / name).is_file()]
    if not there:
        raise ArtifactError(f"{path}: expected a file {' or '.join(FILES)} that names its classes, found none")
    return there[0]


def voc_colours() -> np.ndarray:
    """uint8 [256, 3]: the colours of PASCAL VOC, which spread the bits of a value over those of red, green and blue."""
    values, colours = np.arange(256), np.zeros((256, 3), np.int64)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (values >> (3 * bit + channel) & 1) << (7 - bit) if 3 * bit + channel < 8 else 0
    return colours.astype(np.uint8)


def _twice(values: Any) -> Any:
    seen: set = set()
    return next(value for value in values if value in seen or seen.add(value))  # type: ignore[func-returns-value]  # it adds
