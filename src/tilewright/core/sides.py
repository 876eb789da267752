"""Sizes of one side or two: of grids and of images, and as names state them."""

import re
from numbers import Integral
from typing import Annotated, Any

import msgspec

# A side of an image in pixels. What is larger is a slip of the pen.
Pixels = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
# Of a name: a side, or height and width.
SIZE = r"[1-9]\d*(?:x[1-9]\d*)?"


def stated(pattern: str, name: str) -> dict[str, Any] | None:
    """What a name states by the names of the groups of a regular `pattern`, or None: numbers as such, several with an x
    between them as a tuple. Groups that are not there are left out."""
    match = re.fullmatch(pattern, name)
    return match and {key: _value(text) for key, text in match.groupdict().items() if text is not None}


def _value(text):
    numbers = tuple(map(int, text.split("x"))) if re.fullmatch(r"\d+(x\d+)*", text) else ()
    return text if not numbers else numbers if len(numbers) > 1 else numbers[0]


def pair(sides: Any) -> tuple[int, int]:
    """``(rows, columns)`` of a number, which stands for both, or of a pair."""
    return (sides, sides) if isinstance(sides, Integral) else tuple(sides)
