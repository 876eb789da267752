"""Windows over a video: each token of a grid of frames, rows and columns sees the tokens around it.

As the exact windows of images, with a third axis; compare Hassani et al., "Neighborhood Attention Transformer", CVPR
2023 (arXiv 2204.07143), whose windows stay whole at the edges, where these end with the grid.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "window3d-<frames>x<height>x<width>-w<frames>x<height>x<width>, e.g. window3d-8x16x16-w3x7x7"

# Frames, rows and columns of tokens that belong together: 64 tokens whose windows overlap most.
TOGETHER = 4


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """grid, window: frames, height and width, in tokens; of a window odd, the token in the middle."""

    grid: tuple[_ready.Positive, _ready.Positive, _ready.Positive]
    window: tuple[_ready.Positive, _ready.Positive, _ready.Positive]

    def __post_init__(self) -> None:
        if any(w % 2 == 0 for w in self.window):
            raise ConfigError(f"window: expected odd numbers of tokens, found {'x'.join(map(str, self.window))}")


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    size = r"\d+x\d+x\d+"
    return sides.stated(f"window3d-(?P<grid>{size})-w(?P<window>{size})", name)


def graph(params: Params) -> "Graph":
    """The pattern, frame by frame and row by row; tokens of a small box belong together."""
    (t, h, w), reach = params.grid, [size // 2 for size in params.window]
    at = np.arange(t * h * w).reshape(params.grid)
    spans = [[slice(max(0, i - r), i + r + 1) for i in range(n)] for n, r in zip(params.grid, reach, strict=True)]
    rows = [at[a, b, c].ravel() for a in spans[0] for b in spans[1] for c in spans[2]]
    box = [axis // TOGETHER for axis in np.unravel_index(at.ravel(), params.grid)]
    hint = np.ravel_multi_index(box, [-(-n // TOGETHER) for n in params.grid])
    return _ready.build("window3d", params, rows, at.ravel(), grid=params.grid, hint=hint)


def size(params: Params) -> int:
    """Tokens, and the keys of each."""
    tokens, (a, b, c) = int(np.prod(params.grid)), (min(*pair) for pair in zip(params.grid, params.window, strict=True))
    return tokens * (1 + a * b * c)
