"""Vision Longformer (MsViT): local windows plus global tokens on four grids.

Zhang et al., "Multi-Scale Vision Longformer", ICCV 2021 (arXiv 2103.15358) and its public code. A local query sees the
global tokens and its neighbourhood; a global query sees everything. Stages 1 and 2 are sparse, 3 and 4 are full. The
neighbourhood, for a window of 2f+1:
    ``chunk`` (SW_EXACT 0): the 3 x 3 chunks of f x f tokens around its own chunk; chunks stop at the edge of the grid.
    ``exact`` (SW_EXACT 1): the (2f+1) x (2f+1) tokens centred on the query.
    ``cyclic`` (SW_EXACT -1): as ``chunk``, with chunks wrapped around.
Tokens: the globals first, then the grid, row by row.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "vil-<variant>-<resolution>[-p<patch>]-s<stage>[-exact|-cyclic], e.g. vil-tiny-224-s1"
NETWORK_NAMING = "vil-<variant>-<size or height x width>[-relative][-exact|-cyclic], e.g. vil-tiny-224"

# Heads and width of each stage: the published configurations.
STAGES = {
    "tiny": ((1, 48), (3, 96), (3, 192), (6, 384)),
    "small": ((3, 96), (3, 192), (6, 384), (12, 768)),
    "medium-deep": ((3, 96), (3, 192), (6, 384), (12, 768)),
    "medium-wide": ((3, 192), (6, 384), (8, 512), (12, 768)),
    "base-deep": ((3, 96), (3, 192), (6, 384), (12, 768)),
    "base-wide": ((3, 192), (6, 384), (12, 768), (16, 1024)),
}
GLOBALS = (1, 1, 1, 0)
SPARSE_STAGES = (1, 2)


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of one network. window: 2f+1, odd; f is also the side of a chunk. resolution: pixels a side."""

    variant: Literal["tiny", "small", "medium-deep", "medium-wide", "base-deep", "base-wide"]
    resolution: sides.Pixels
    stage: Annotated[int, msgspec.Meta(ge=1, le=4)]
    patch: Annotated[int, msgspec.Meta(ge=1)] = 4
    mode: Literal["chunk", "exact", "cyclic"] = "chunk"
    window: Annotated[int, msgspec.Meta(ge=3)] = 15

    def __post_init__(self) -> None:
        if self.window % 2 == 0:
            raise ConfigError(f"window: expected an odd number of tokens, found {self.window}")
        if self.stage not in SPARSE_STAGES and (self.mode, self.window) != ("chunk", 15):
            raise ConfigError(f"stage {self.stage} attends to everything: expected no window mode or size for it")
        if not self.side:
            raise ConfigError(f"resolution {self.resolution} leaves no token at stage {self.stage}, patch {self.patch}")
        if self.mode == "cyclic" and -(-self.side // self.radius) < 3:
            # With two chunks, the left and the right neighbour are one: a key would count twice.
            raise ConfigError(
                f"cyclic chunks: expected a grid of at least 3 chunks of {self.radius} a side, found {self.side} tokens"
            )

    @property
    def side(self) -> int:
        """Tokens along a side of the grid: strided convolutions drop what is left over."""
        return self.resolution // self.patch >> (self.stage - 1)

    @property
    def radius(self) -> int:
        """The published f: reach of the window and side of a chunk."""
        return self.window // 2

    @property
    def n_global(self) -> int:
        """Global tokens of the stage."""
        return GLOBALS[self.stage - 1]


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    known = "|".join(STAGES)
    sizes = r"(?P<resolution>\d+)(?:-p(?P<patch>\d+))?-s(?P<stage>[1-4])"
    return sides.stated(rf"vil-(?P<variant>{known})-{sizes}(?:-(?P<mode>exact|cyclic))?", name)


def network_fields(name: str) -> Any:
    """Options of the network that a name states, or None."""
    options = "(?:-(?P<position>relative))?(?:-(?P<window_mode>exact|cyclic))?"
    return sides.stated(rf"vil-(?P<variant>{'|'.join(STAGES)})-(?P<image_size>{sides.SIZE}){options}", name)


def graph(params: Params) -> "Graph":
    """The exact pattern; chunk modes hold one row for each chunk, so that images of 4096 pixels a side take seconds."""
    heads, dim = STAGES[params.variant][params.stage - 1]
    n, g, f = params.side, params.n_global, params.radius
    mode = params.mode if params.stage in SPARSE_STAGES else "full"
    reach = n if mode == "full" else 2 * f
    meta = {
        "family": "vision_longformer",
        "paper_family": "ViL",
        "variant": params.variant,
        "resolution": params.resolution,
        "patch": params.patch,
        "stage": params.stage,
        "heads": heads,
        "head_dim": dim // heads,
        "grid": [n, n],
        "n_global": g,
        "window": None if mode == "full" else params.window,
        "mode": mode,
        "bias": {
            "kind": "local offsets, local to global, global to local, global to global, none",
            "table_size": (2 * reach - 1) ** 2,
            "slots": (2 * reach - 1) ** 2 + 2 * g + g * g + 1,
        },
    }
    return pattern(n, g, f, mode, meta=meta)


def pattern(
    side: tuple[int, int] | int,
    n_global: int,
    radius: int,
    mode: str,
    *,
    padding: int | tuple[int, int] = 0,
    meta: dict[str, Any] | None = None,
) -> "Graph":
    """The pattern of a stage by its geometry: `n_global` tokens and a grid of `side` x `side` or ``(rows, columns)``.

    mode: of `Params.mode`, or ``full``. padding: rows and columns of zeros behind the grid, as tokens of their own; the
    public code pads to whole chunks, and in ``cyclic`` mode its first chunks attend to those zeros.
    """
    g, (height, width) = n_global, sides.pair(side)
    below, right = sides.pair(padding)
    (down, tall), (across, wide) = _axis(height, radius, mode, below), _axis(width, radius, mode, right)
    columns = width + right
    seen_globals = np.arange(g, dtype=np.int32)
    own = np.arange(height, dtype=np.int32), np.arange(width, dtype=np.int32)
    rows = [np.concatenate((seen_globals, g + np.add.outer(columns * own[0], own[1]).ravel()))] * (g > 0)
    rows += [np.concatenate((seen_globals, g + np.add.outer(columns * y, x).ravel())) for y in tall for x in wide]
    local_class = (down[:, None] * len(wide) + across).ravel()
    hint = np.concatenate((np.full(g, -1), _squares(height + below, columns) if mode == "exact" else local_class))
    return _ready.of_rows(rows, np.concatenate((np.zeros(g, np.int32), (g > 0) + local_class)), meta or {}, hint)


def _axis(n, f, mode, padding):
    """Group of each of `n + padding` coordinates, and for each group the sorted coordinates it sees, along one axis."""
    at = np.arange(n + padding, dtype=np.int32)
    if mode == "full":
        return np.zeros_like(at), [at]
    if mode == "exact":
        return at, [at[max(0, i - f) : i + f + 1] for i in range(n)]
    chunk, count = at // f, -(-n // f)
    if mode == "chunk":
        return chunk, [at[abs(chunk - c) <= 1] for c in range(count)]
    # ASSUME: in T1's graphs, which have no `padding`, no query sees padded keys. The public code masks them
    # where the last chunk is reached directly; the first chunk, which reaches it by wrapping around, attends to them.
    return chunk, [at[((chunk - c + 1) % count <= 2) & ((at < n) | (c == 0))] for c in range(count)]


def _squares(height, width):
    """Square of each token of a grid: 8 x 8 tokens, row by row, each of four of 4 x 4.

    A group of 64 or of 16 queries is then a square, whose windows overlap most. Of raster, strips, Z curve and squares
    of 7 or 8 this gives the least gathered work for M = 16 and 64 on grids of 32, 56 and 96.
    """
    y, x = np.arange(height, dtype=np.int64)[:, None], np.arange(width, dtype=np.int64)
    tile = y // 8 * -(-width // 8) + x // 8
    return (4 * tile + 2 * (y % 8 // 4) + x % 8 // 4).ravel()


def bias_index_at(
    where: Any, grid: tuple[int, int], n_global: int, reach: int, chunk: int | None, rows: Any, cols: Any
) -> Any:
    """Index of each (query, key) pair in a head's bias, for arrays or tensors: ``where`` is numpy's or torch's.

    It is laid out as the published tables of the sparse stages, one after the other:
    ``local_relative_position_bias_table`` [(4f-1)^2] by offset query minus key, ``g2l_relative_position_bias[1]`` [g]
    (local query, by key), ``g2l_relative_position_bias[0]`` [g] (global query, by query),
    ``g2g_relative_position_bias`` [g, g], and last the entry of pairs outside the pattern.

    grid: its rows and columns, padding included. reach: 2f. chunk: f where chunks wrap around, else None.
    """
    (height, width), g = grid, n_global
    qy, qx, ky, kx = (rows - g) // width, (rows - g) % width, (cols - g) // width, (cols - g) % width
    if chunk is not None:
        # The copy of the key that lies in one of the three chunks around the query's own.
        ky, kx = (
            chunk * (q // chunk - 1 + (k // chunk - q // chunk + 1) % -(-side // chunk)) + k % chunk
            for q, k, side in ((qy, ky, height), (qx, kx, width))
        )
    dy, dx = qy - ky, qx - kx
    offsets = 2 * reach - 1
    size = offsets * offsets
    inside = (abs(dy) < reach) & (abs(dx) < reach)
    local = where(inside, (dy + reach - 1) * offsets + dx + reach - 1, size + 2 * g + g * g)
    of_global = where(cols < g, size + 2 * g + rows * g + cols, size + g + rows)
    return where(rows < g, of_global, where(cols < g, size + cols, local))


def size(params: Params) -> int:
    """Tokens and entries of the distinct rows: one for each pair of spans of coordinates, and one of the globals where
    the others do not see everything anyway."""
    mode = params.mode if params.stage in SPARSE_STAGES else "full"
    _, spans = _axis(params.side, params.radius, mode, 0)
    n_tokens, seen = params.n_global + params.side**2, sum(len(coordinates) for coordinates in spans)
    of_globals = n_tokens if params.n_global and mode != "full" else 0
    return n_tokens + of_globals + seen**2 + params.n_global * len(spans) ** 2
