"""Keys that are known beforehand: a mask, a mask function, or a pattern of a video's tokens, frame by frame.

A group lists the keys that any of its queries sees. Patterns of tokens (t, y, x), N = height x width to a frame and
s = y x width + x:
- `spatial` (Sparse VideoGen, arXiv 2502.01776): frames at most `reach` apart;
- `temporal` (the same): places s at most `reach` apart, in all frames;
- `window` (Sliding Tile Attention, arXiv 2502.04507): tiles of the grid at most half of `window` apart; a query near
  the edge sees the window that lies inside;
- `radial` (Radial Attention, arXiv 2506.19852): places whose distance is below N, halved for each octave of the
  distance of frames; where less than one place is left, the same place of every so many frames.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch
from torch import Tensor

from tilewright.core import arguments
from tilewright.core.errors import ConfigError, PatternError
from tilewright.slices.predictors import Settings

if TYPE_CHECKING:
    from tilewright.slices.cpu.selection import Selection
    from tilewright.slices.layout import Layout

Positive = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
# What each pattern is stated by, beside the grid.
STATED = {"spatial": ("reach",), "temporal": ("reach",), "window": ("tile", "window"), "radial": ()}
# Pairs of a group and a key that are worked out at a time.
PAIRS = 1 << 23


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """pattern: None for a mask. grid: frames, height and width. reach: of a band, in frames or tokens. tile, window:
    tokens of a tile, and tiles of a window, odd numbers, in each dimension. sink: first frames that all queries see.
    The grid's tokens are those that are not text."""

    pattern: Literal["spatial", "temporal", "window", "radial"] | None = None
    grid: tuple[Positive, Positive, Positive] | None = None
    reach: Number | None = None
    tile: tuple[Positive, Positive, Positive] | None = None
    window: tuple[Positive, Positive, Positive] | None = None
    sink: Number = 0

    takes, known = ("mask",), True

    def check(self, layout: "Layout") -> None:
        """See `Settings`."""
        if self.pattern is None:
            return
        needed = ("grid", *STATED[self.pattern])
        found = [name for name in ("grid", "reach", "tile", "window") if getattr(self, name) is not None]
        if set(found) != set(needed):
            raise ConfigError(
                f"pattern {self.pattern}: expected {', '.join(needed)}, found {', '.join(found) or 'none of these'}"
            )
        assert self.grid is not None
        frames, height, width = self.grid
        tokens, of_text = frames * height * width, layout.first + layout.last
        if (layout.queries, layout.keys) != (tokens, tokens + of_text):
            raise ConfigError(
                f"grid: expected {layout.tokens} queries and {layout.keys} keys, found {frames}x{height}x{width} and "
                f"{of_text} of text, {tokens + of_text} tokens"
            )
        if self.window is None:
            return
        assert self.tile is not None
        if any(n % size for n, size in zip(self.grid, self.tile, strict=True)):
            raise ConfigError(f"tile: expected sizes that divide the grid {self.grid}, found {self.tile}")
        if any(n % 2 == 0 for n in self.window):
            raise ConfigError(f"window: expected odd numbers of tiles, found {self.window}")


def group_bytes(params: Params, layout: "Layout", head_dim: int) -> int:
    """See the contract."""
    return layout.keys


def codes(selection: "Selection", q: Tensor, k: Tensor, params: Params, *, scale: float, mask: Tensor) -> Tensor:
    """See the contract."""
    return selection.given(mask)


def mask(params: Params, layout: "Layout", device: torch.device | str) -> Tensor:
    """See the contract."""
    if params.pattern is None:
        raise ConfigError(
            f"predictor given: expected a mask or a pattern, found neither; known patterns: {', '.join(STATED)}"
        )
    t, y, x = _tokens(params, device)
    sees = _PATTERNS[params.pattern](params, t, y, x)

    def allowed(b, h, query, key):
        # Keys of text stand for one of the grid where they are looked up; all groups list them.
        at, other = query - layout.first, (key - layout.first).clamp(0, len(t) - 1)
        return sees(at, other) | (t[other] < params.sink)

    return of_function(allowed, layout, device)


def of_function(
    allowed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], layout: "Layout", device: torch.device | str
) -> Tensor:
    """bool [B or 1, H or 1, G, N_k]: the keys that a query of each group sees; 1 where all are alike.

    allowed: ``(b, h, query, key) -> bool``, of int64 tensors that broadcast, as FlexAttention's mask functions. It is
    asked of `PAIRS` pairs at a time at most, or of the keys of one query of all heads where these are more.
    """
    b, h = (torch.arange(n, device=device) for n in (layout.batch, layout.heads))
    key, at = torch.arange(layout.keys, device=device), (b[:, None, None, None], h[:, None, None])

    def asked(query, key):
        try:
            found = allowed(*at, query, key)
        # A user's function may raise anything.
        except Exception as error:
            raise PatternError(f"mask function: evaluated on {device}: {' '.join(str(error).split())}") from error
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            raise PatternError(f"mask function: expected a boolean tensor, found {arguments.shown(found)}")
        return found

    alike = torch.broadcast_shapes(asked(key[:1, None], key[:1]).shape, (1, 1, 1, 1))[:2]
    found = torch.zeros(*alike, layout.groups, layout.keys, dtype=torch.bool, device=device)
    step = max(1, PAIRS // (alike[0] * alike[1] * layout.keys))
    for first in range(0, layout.groups, step):
        seen = found[:, :, first : first + step]
        groups = torch.arange(first, first + seen.shape[2], device=device)[:, None]
        for row in range(layout.rows):
            # The last group repeats its last query.
            query = layout.first + (groups * layout.rows + row).clamp(max=layout.queries - 1)
            seen |= asked(query, key)
    return found


def _tokens(params, device):
    """``(t, y, x)`` of the tokens of the grid, int64."""
    frames, height, width = params.grid
    number = torch.arange(frames * height * width, device=device)
    return number // (height * width), number // width % height, number % width


def _spatial(params, t, y, x):
    return lambda query, key: (t[query] - t[key]).abs() <= params.reach


def _temporal(params, t, y, x):
    place = y * params.grid[2] + x
    return lambda query, key: (place[query] - place[key]).abs() <= params.reach


def _window(params, t, y, x):
    tiles = [at // size for at, size in zip((t, y, x), params.tile, strict=True)]
    middles = []
    for tile, n, size, width in zip(tiles, params.grid, params.tile, params.window, strict=True):
        half = min(width // 2, (n // size - 1) // 2)
        middles.append((tile.clamp(half, max(half, n // size - 1 - half)), width // 2))

    def sees(query, key):
        near = ((middle[query] - tile[key]).abs() <= half for (middle, half), tile in zip(middles, tiles, strict=True))
        return torch.stack(torch.broadcast_tensors(*near)).all(0)

    return sees


def _radial(params, t, y, x):
    place, n = y * params.grid[2] + x, params.grid[1] * params.grid[2]

    def sees(query, key):
        frames = (t[query] - t[key]).abs()
        # 2 ** floor(log2 d), without rounding.
        octave = torch.pow(2, frames.clamp(min=1).double().log2().floor()).long()
        distance = (place[query] - place[key]).abs()
        near = (octave <= n) & ((distance + 1) * octave <= n)
        return near | ((distance == 0) & (frames % ((octave + n - 1) // n) == 0))

    return sees


_PATTERNS = {"spatial": _spatial, "temporal": _temporal, "window": _window, "radial": _radial}
