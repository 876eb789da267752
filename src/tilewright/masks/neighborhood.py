"""Neighbourhood attention: each token of a grid sees a window of tokens around it, by `tilewright.neighborhood.rule`.

Hassani et al., "Neighborhood Attention Transformer", CVPR 2023 (arXiv 2204.07143). At the borders windows are shifted,
or cut as those of `window3d`. The pattern is held pair by pair: for small grids.
"""

import itertools
import re
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tilewright.core.errors import ConfigError, PatternError
from tilewright.masks import _ready
from tilewright.neighborhood import rule as rules

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = (
    "neighborhood-<grid>-w<window>, then -s<stride>, -d<dilation>, -causal<axes> and -cut as needed, "
    "e.g. neighborhood-8x16x16-w3x7x7"
)

# Tokens that belong together, along each axis of a grid of 1, 2 or 3 axes: 64, whose windows overlap most.
SIDES = (64,), (8, 8), (4, 4, 4)


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """grid: tokens along each axis. window, stride, dilation, causal, border: as `rule.Rule` has them."""

    grid: tuple[_ready.Positive, ...]
    window: tuple[_ready.Positive, ...]
    stride: tuple[_ready.Positive, ...]
    dilation: tuple[_ready.Positive, ...]
    causal: tuple[bool, ...]
    border: Literal["shift", "cut"] = "shift"

    def __post_init__(self) -> None:
        try:
            self.rule.check_grid(self.grid)
        except PatternError as error:
            raise ConfigError(str(error)) from None

    @property
    def rule(self) -> rules.Rule:
        """Which keys a query sees."""
        return rules.make(len(self.grid), self.window, self.stride, self.dilation, self.causal, self.border)


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    sides = r"\d+(?:x\d+){0,2}"
    options = rf"(?:-s(?P<stride>{sides}))?(?:-d(?P<dilation>{sides}))?(?:-causal(?P<causal>[0-2]*))?(?P<cut>-cut)?"
    match = re.fullmatch(rf"neighborhood-(?P<grid>{sides})-w(?P<window>{sides}){options}", name)
    if not match:
        return None
    stated = {part: _numbers(match[part] or "1") for part in ("grid", "window", "stride", "dilation")}
    axes = len(stated["grid"])
    # One number is that of all axes.
    stated = {part: found * axes if len(found) == 1 else found for part, found in stated.items()}
    causal = [match["causal"] == "" or str(axis) in (match["causal"] or "") for axis in range(axes)]
    return stated | {"causal": causal, "border": "cut" if match["cut"] else "shift"}


def _numbers(text):
    return list(map(int, text.split("x")))


def graph(params: Params) -> "Graph":
    """The pattern, row by row; tokens of a small box belong together, those of one remainder by the dilation."""
    seen, rows_of, hint = [], np.zeros(1, np.int64), np.zeros(1, np.int64)
    for axis, length, side in zip(params.rule.axes, params.grid, SIDES[len(params.grid) - 1], strict=True):
        keys, number = _along(axis, length)
        box = np.arange(length) // axis.dilation // side * axis.dilation + np.arange(length) % axis.dilation
        seen.append(keys)
        rows_of = np.add.outer(rows_of * len(keys), number).ravel()
        hint = np.add.outer(hint * length, box).ravel()
    at = np.arange(len(hint)).reshape(params.grid)
    rows = [at[np.ix_(*keys)].ravel() for keys in itertools.product(*seen)]
    return _ready.build("neighborhood", params, rows, rows_of, grid=params.grid, hint=hint)


def _along(axis, length):
    """``(keys, number)``: the key sets along one axis, by first appearance, and that of each position."""
    seen: dict[tuple[int, int, int], list[int]] = {}
    for x in range(length):
        index, first = divmod(x, axis.dilation)
        lo, hi = axis.keys(index, axis.lengths(length)[first])
        seen.setdefault((first, int(lo), int(hi)), []).append(x)
    keys = [np.arange(lo, hi) * axis.dilation + first for first, lo, hi in seen]
    number = np.empty(length, np.int64)
    for place, positions in enumerate(seen.values()):
        number[positions] = place
    return keys, number


def size(params: Params) -> int:
    """Tokens, and the keys of each."""
    tokens = prod(params.grid)
    return tokens * (1 + prod(params.window))
