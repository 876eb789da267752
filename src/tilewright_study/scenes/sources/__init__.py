"""Sources of images with labels: what networks are trained with and judged by.

Contract of a member module: ``create(**options)`` returns a source, an object with
    ``classes``: names of the labels 0, 1, ….
    ``task``: ``maps``, a label for each pixel, or ``classes``, one for each image.
    ``splits``: names of its parts, which have no image in common.
    ``count(split) -> int``: how many images a split has.
    ``whole(split, index) -> (picture, labels)``, of sources that read label maps: uint8 [H, W, 3] and [H, W], of the
        file's size. ``labels``, of these, too: their `scenes.labels.Labels`.
    ``read(split, indices, size, device="cpu") -> (images, labels)``: images float32 [B, 3, H, W], normalised as
        `normalised` does; labels uint8 [B, H, W], `VOID` where there is none, or int64 [B]. size: pixels of a side, or
        (height, width). What is read follows from the arguments alone.

All raise `UnknownNameError` for a split, `PatternError` for an index or a size, `ConfigError` for options, and
`ArtifactError` for files. Importing this package does not import torch.
"""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tilewright.core.errors import ConfigError, PatternError, UnknownNameError
from tilewright.core.registry import check, member

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("scenes", "crops", "stream", "own", "camvid", "ade20k", "cityscapes", "voc", "coco_stuff", "folder")
# Published layouts of images with label maps.
LABELLED = ("camvid", "ade20k", "cityscapes", "voc", "coco_stuff")
# Label of pixels that have none.
VOID = 255
# Mean and standard deviation of red, green and blue over ImageNet, in 0..1: what published networks expect.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Source(Protocol):
    """What a member creates, see the package."""

    classes: tuple[str, ...]
    task: str
    splits: tuple[str, ...]

    def count(self, split: str) -> int:
        """How many images a split has."""

    def read(self, split: str, indices: Sequence[int], size, device="cpu") -> "tuple[Tensor, Tensor]":
        """Images and labels of a split."""


def create(name: str, **options) -> Source:
    """The source of a name, such as ``scenes``, or ``camvid`` with ``folder=PATH``.

    Raises `UnknownNameError`, `ConfigError` for options that the source does not have, and `ArtifactError` for files.
    """
    module = member(__name__, "source", name, NAMES)
    known = signature(module.create).parameters
    if unknown := [option for option in options if option not in known]:
        raise ConfigError(f"source {name}: unknown option {unknown[0]!r}; known: {', '.join(known)}")
    return module.create(**options)


def stated(text: str) -> Source:
    """The source that a text states: ``NAME``, ``NAME=FOLDER``, or the ``FOLDER`` of one's own. Raises as `create`."""
    name, (before, equals, folder) = named(text), text.partition("=")
    return create(name, **({"folder": folder if before == name else text} if equals or before != name else {}))


def named(text: str) -> str:
    """The name of the source that a text states, see `stated`. Raises `UnknownNameError`."""
    name, _, _ = text.partition("=")
    if name not in NAMES and not Path(text).is_dir():
        raise UnknownNameError("source", text, (*NAMES, "a folder with data.toml"))
    return name if name in NAMES else "own"


def normalised(pictures: "Tensor") -> "Tensor":
    """Images float32 [B, 3, H, W] of pictures uint8 [B, 3, H, W]: less ImageNet's mean, over its deviation."""
    import torch

    mean, deviation = (
        torch.tensor(numbers, device=pictures.device).mul(255).view(3, 1, 1) for numbers in (MEAN, DEVIATION)
    )
    return (pictures - mean) / deviation


def pixels(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a size. Raises `PatternError`."""
    found = (size, size) if isinstance(size, int) else tuple(size)
    if len(found) != 2 or min(found) < 1:
        raise PatternError(f"size: expected pixels of a side, or height and width, found {size}")
    return found


def checked(source: Source, split: str, indices: Sequence[int]) -> list[int]:
    """Indices of a split, as a list. Raises `UnknownNameError` and `PatternError`."""
    check("split", split, source.splits)
    indices, count = [int(index) for index in indices], source.count(split)
    if outside := [index for index in indices if not 0 <= index < count]:
        raise PatternError(f"split {split}: expected indices from 0 to {count - 1}, found {outside[0]}")
    return indices
