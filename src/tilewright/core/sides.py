"""Sizes of one side or two: of grids and of images, and as names state them."""

from numbers import Integral
from typing import Annotated, Any

import msgspec

# A side of an image in pixels. What is larger is a slip of the pen.
Pixels = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
# Of a name: a side, or height and width. Its two groups are for `stated`.
SIZE = r"([1-9]\d*)(?:x([1-9]\d*))?"


def stated(height: str, width: str | None) -> tuple[int, int] | int:
    """The size that the groups of `SIZE` state: an int, or ``(height, width)``."""
    return int(height) if width is None else (int(height), int(width))


def pair(sides: Any) -> tuple[int, int]:
    """``(rows, columns)`` of a number, which stands for both, or of a pair."""
    return (sides, sides) if isinstance(sides, Integral) else tuple(sides)
