"""Arch strings of the public Vision Longformer code: ``l1,h1,d48,n1,s1,g1,p4,f7,a1_l2,...``, one part for each stage.

Letters: l number of the stage, h heads, d width, n blocks, s sparse or full attention, g global tokens, p patch (the
stride on the grid before), f half the window and side of a chunk, a absolute or relative position.
"""

import re
from dataclasses import dataclass

from tilewright.core.errors import ConfigError
from tilewright.masks.vision_longformer import GLOBALS, SPARSE_STAGES, STAGES

# Blocks of each stage: the published configurations; heads, widths and globals are those of the graphs.
BLOCKS = {
    "tiny": (1, 1, 9, 1),
    "small": (1, 2, 8, 1),
    "medium-deep": (1, 4, 16, 1),
    "medium-wide": (1, 2, 8, 1),
    "base-deep": (1, 8, 24, 1),
    "base-wide": (1, 2, 8, 1),
}
REQUIRED = ("l", "h", "d", "n", "p")
# What the public code takes where a string says nothing.
DEFAULTS = {"s": 1, "g": 1, "f": 7, "a": 1}
LETTERS = (*REQUIRED, *DEFAULTS)
FLAGS = ("s", "a")


@dataclass(frozen=True)
class Shape:
    """One stage. patch: stride on the grid before. radius: the published f. grid: its rows and columns of tokens."""

    number: int
    heads: int
    dim: int
    blocks: int
    patch: int
    sparse: bool
    n_global: int
    radius: int
    absolute: bool
    grid: tuple[int, int]


def published(variant: str):
    """The arch string of a published variant, its position left open."""
    stages = zip(STAGES[variant], BLOCKS[variant], GLOBALS, strict=True)
    return "_".join(
        f"l{i},h{heads},d{dim},n{blocks},s{int(i in SPARSE_STAGES)},g{n_global},p{4 if i == 1 else 2},f7"
        for i, ((heads, dim), blocks, n_global) in enumerate(stages, 1)
    )


def parse(arch, pixels, position=None) -> tuple:
    """The stages of an arch string on images of ``(height, width)`` pixels, as a tuple of `Shape`.

    position: ``absolute`` or ``relative``, for stages that do not state ``a``. Raises `ConfigError` for letters or
    values that are unknown or missing, and for a position that contradicts ``a``. Small images leave no token.
    """
    grid, sparse, shapes = tuple(pixels), True, []
    for number, text in enumerate(arch.split("_"), 1):
        stated = _stated(text, f"arch, stage {number}")
        if position is not None:
            asked = int(position == "absolute")
            if stated.setdefault("a", asked) != asked:
                raise ConfigError(f"arch, stage {number}: position {position!r} contradicts a{stated['a']}")
        values = DEFAULTS | stated
        _check(values, number)
        grid = tuple(side // values["p"] for side in grid)
        # As published: behind a full stage, all are full.
        sparse = sparse and bool(values["s"])
        shape = (
            values["h"],
            values["d"],
            values["n"],
            values["p"],
            sparse,
            values["g"],
            values["f"],
            bool(values["a"]),
        )
        shapes.append(Shape(number, *shape, grid))
    if len(shapes) not in (3, 4):
        raise ConfigError(f"arch: expected 3 or 4 stages, found {len(shapes)}")
    return tuple(shapes)


def _stated(text, where):
    stated = {}
    for field in text.split(","):
        letter, digits = field[:1], field[1:]
        if letter not in LETTERS or letter in stated or not re.fullmatch("[0-9]+", digits):
            known = ", ".join(LETTERS)
            raise ConfigError(f"{where}: expected letters {known}, each once and with a number, found {field!r}")
        stated[letter] = int(digits)
    if missing := [letter for letter in REQUIRED if letter not in stated]:
        raise ConfigError(f"{where}: expected all of {', '.join(REQUIRED)}; missing: {', '.join(missing)}")
    return stated


def _check(values, number):
    where = f"arch, stage {number}"
    for letter, value in values.items():
        if letter in FLAGS and value > 1:
            raise ConfigError(f"{where}: expected {letter}0 or {letter}1, found {letter}{value}")
        if letter not in (*FLAGS, "g") and value < 1:
            raise ConfigError(f"{where}: expected {letter} of at least 1, found {letter}{value}")
    if values["l"] != number:
        raise ConfigError(f"{where}: expected l{number}, found l{values['l']}")
    if values["d"] % values["h"]:
        raise ConfigError(f"{where}: expected heads that divide the width, found h{values['h']} and d{values['d']}")
    if values["a"] and values["d"] % 2:
        raise ConfigError(f"{where}: expected an even width with absolute position, found d{values['d']}")
