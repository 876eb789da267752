"""Classes of label maps, and their colours: a small file beside one's data, or a record in memory."""

import json
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

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


def read(path: Path | str) -> Labels:
    """The classes that a file in TOML or JSON states, or one of `FILES` in a folder. Raises `ArtifactError`."""
    path = found(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected classes in TOML or JSON, such as {FILES[0]}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: expected classes in TOML or JSON, found: {error}") from error
    return contents.fields(path, "data", document, Labels)


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
