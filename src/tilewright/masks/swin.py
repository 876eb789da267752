"""Swin's windows over a grid, plain or shifted by half a window.

Liu et al., "Swin Transformer", ICCV 2021 (arXiv 2103.14030): shifted windows wrap around the grid, and a mask keeps
what comes from opposite edges apart. Here stand also the names and sizes of its networks with the decoder UPerNet
(Xiao et al., ECCV 2018, arXiv 1807.10221), as in the official code for segmentation.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "swin-<side>-w<window>[-shift], e.g. swin-56-w7-shift"
NETWORK_NAMING = "swin-<tiny|small|base|large>-<size or height x width>[-w<window>][-linear], e.g. swin-tiny-512"
# Heads behind its four stages, the published one first.
DECODE_HEADS = ("upernet", "linear")


class Size(NamedTuple):
    """Channels of the first stage, doubled from stage to stage; blocks, and heads of the first stage, doubled, too."""

    width: int
    depths: tuple[int, ...]
    heads: int


VARIANTS = {
    "tiny": Size(96, (2, 2, 6, 2), 3),
    "small": Size(96, (2, 2, 18, 2), 3),
    "base": Size(128, (2, 2, 18, 2), 4),
    "large": Size(192, (2, 2, 18, 2), 6),
}
PATCH, WINDOW, MLP_RATIO = 4, 7, 4
# Of UPerNet: channels, and the sides to which its last map is pooled.
CHANNELS, POOLS = 512, (1, 2, 3, 6)
# The smallest side in pixels: of it the last stage has one token.
LEAST = 32


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """side: of the grid, in tokens. window: side of a window. shift: whether windows are shifted."""

    side: _ready.Positive
    window: _ready.Positive
    shift: bool = False

    def __post_init__(self) -> None:
        if self.side % self.window:
            raise ConfigError(f"side: expected a multiple of the window of {self.window}, found {self.side}")


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    found = sides.stated(r"swin-(?P<side>\d+)-w(?P<window>\d+)(?P<shift>-shift)?", name)
    return found and found | {"shift": "shift" in found}


def network_fields(name: str) -> dict | None:
    """Options of the network that a name states, or None."""
    size, options = f"(?P<image_size>{sides.SIZE})", r"(?:-w(?P<window>[1-9]\d*))?(?:-(?P<head>linear))?"
    return sides.stated(f"swin-(?P<variant>{'|'.join(VARIANTS)})-{size}{options}", name)


def channels(variant: str, head: str) -> int:
    """Channels of a head as published."""
    return CHANNELS


def grids(pixels: tuple[int, int]) -> Any:
    """Rows and columns of tokens of the four stages, for images of ``(height, width)`` pixels."""
    found = [tuple(-(-side // PATCH) for side in pixels)]
    for _ in range(3):
        found.append(tuple(-(-side // 2) for side in found[-1]))
    return found


def graph(params: Params) -> "Graph":
    """The pattern, row by row of the grid."""
    n = params.side
    rows, window = partition((n, n), params.window, params.window // 2 * params.shift)
    return _ready.build("swin", params, rows, window, grid=(n, n), hint=window)


def pattern(grid: Any, window: int, shift: int, meta: dict[str, Any]) -> "Graph":
    """The windows of a grid of whole ones, shifted by so many tokens, as a graph."""
    rows, number = partition(grid, window, shift)
    return _ready.of_rows(rows, number, meta, number)


def partition(grid: Any, window: int, shift: int) -> tuple[list[np.ndarray], np.ndarray]:
    """``(rows, number)``: the tokens of each window, and each token's window, of a grid of whole windows, shifted."""
    parts = []
    for n in grid:
        at = (np.arange(n) - shift) % n
        # Windows along one axis; what was wrapped around is apart from what was not.
        parts.append(at // window * 2 + (at >= n - shift))
    _, first, number = np.unique(
        np.add.outer(4 * grid[1] * parts[0], parts[1]).ravel(), return_index=True, return_inverse=True
    )
    # Numbered by first appearance, as distinct rows are.
    number = np.argsort(np.argsort(first))[number]
    return [np.flatnonzero(number == each) for each in range(len(first))], number


def size(params: Params) -> int:
    """Tokens, and each of them in one window."""
    return 2 * params.side**2
