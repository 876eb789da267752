"""RegionViT: regional tokens that see each other, and windows that see their region (Chen et al., arXiv 2106.02689).

Each block runs the same attention twice: densely over the R regional tokens, then over every sequence [1 regional, w^2
local]. The graph is the union of the two; `windows` is the second alone. Regional and local grid are rounded up, so
that every region has a window; local tokens beyond the image are padding and are not part of the graph. Tokens: the
regionals, row by row, then the locals, row by row.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "regionvit-<variant>-<resolution>[-w14][-p<patch>]-s<stage>[-windows], e.g. regionvit-tiny-224-s1"
NETWORK_NAMING = "regionvit-<variant>-<size or height x width>[-w14][-peg], e.g. regionvit-tiny-224"

# Heads of stage 1; they double with each stage, as the width does.
HEADS = {"tiny": 2, "small": 3, "medium": 3, "base": 4}
HEAD_DIM = 32


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of one network. window: w, local tokens along a side of a region. resolution: pixels a side.

    part: ``windows`` leaves the attention among the regionals out. head_dim: default as published.
    """

    variant: Literal["tiny", "small", "medium", "base"]
    resolution: sides.Pixels
    stage: Annotated[int, msgspec.Meta(ge=1, le=4)]
    patch: Annotated[int, msgspec.Meta(ge=1)] = 4
    window: Annotated[int, msgspec.Meta(ge=2)] = 7
    part: Literal["all", "windows"] = "all"
    head_dim: Annotated[int, msgspec.Meta(ge=1)] = HEAD_DIM

    def __post_init__(self) -> None:
        if self.patch > self.resolution:
            raise ConfigError(f"patch: expected at most the resolution {self.resolution}, found {self.patch}")
        if self.part == "windows" and self.side % self.window:
            # The padding would be tokens of the graph, which have no bias of their own.
            raise ConfigError(f"windows: expected a multiple of {self.window} tokens a side, found {self.side}")

    @property
    def side(self) -> int:
        """Local tokens along a side: the patch size, then each later stage (3 x 3, stride 2), divides and rounds up."""
        # ASSUME: rounded up at every patch size, as the three-layer stem does; the one-layer stem rounds down where 4
        # does not divide the resolution.
        return _ceil(self.resolution, self.patch << (self.stage - 1))

    @property
    def regions(self) -> int:
        """Regional tokens along a side."""
        return _ceil(self.resolution, self.patch * self.window << (self.stage - 1))


def _ceil(a, b):
    return -(-a // b)


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    known = "|".join(HEADS)
    sizes = r"(?P<resolution>\d+)(?:-w(?P<window>14))?(?:-p(?P<patch>\d+))?-s(?P<stage>[1-4])"
    return sides.stated(rf"regionvit-(?P<variant>{known})-{sizes}(?:-(?P<part>windows))?", name)


def network_fields(name: str) -> Any:
    """Options of the network that a name states, or None. Suffixes may also stand before the size, as published."""
    known, suffixes = "|".join(HEADS), "(?:-w(?P<window{0}>14))?(?P<peg{0}>-peg)?"
    size = f"(?P<image_size>{sides.SIZE})"
    found = sides.stated(f"regionvit-(?P<variant>{known}){suffixes.format(1)}-{size}{suffixes.format(2)}", name)
    # As the first or the last, they state the same.
    return found and {key.rstrip("12"): True if key.startswith("peg") else value for key, value in found.items()}


def graph(params: Params) -> "Graph":
    """The exact pattern: one distinct row for each regional token and one for the locals of each window."""
    n, r, w = params.side, params.regions, params.window
    meta = {
        "family": "regionvit",
        "paper_family": "RegionViT",
        "variant": params.variant,
        "resolution": params.resolution,
        "patch": params.patch,
        "stage": params.stage,
        "heads": HEADS[params.variant] << (params.stage - 1),
        "head_dim": params.head_dim,
        "grid": [n, n],
        "n_regional": r * r,
        "window": w,
        "mode": {"all": "regional", "windows": "windows"}[params.part],
        "bias": {
            "kind": "local offsets within a window, none",
            "table_size": (2 * w - 1) ** 2,
            "slots": (2 * w - 1) ** 2 + 1,
        },
    }
    if params.part == "windows":
        return replace(windows(n, r, w), meta=meta)
    region, members = _members((n, n), (r, r), w)
    regionals = np.arange(r * r, dtype=np.int32)
    rows = [np.concatenate((regionals, window)) for window in members]
    rows += [np.concatenate((regionals[i : i + 1], window)) for i, window in enumerate(members)]
    hint = np.concatenate((np.full(r * r, -1), region))
    return _ready.of_rows(rows, np.concatenate((regionals, r * r + region)), meta, hint)


def windows(side: Any, regions: Any, window: Any) -> "Graph":
    """The pattern of the windows alone: each region's token with its locals.

    side, regions: tokens along a side of the local and of the regional grid, or ``(rows, columns)`` of each.
    Where the regions reach beyond the image, the published mask of the last window hides only the corner of its
    padding: the window sees the padding to the right of the image and that below it, and each of these two sees itself
    and the window. They are tokens like others, behind the locals: first those to the right, then those below.
    """
    grid, regions = sides.pair(side), sides.pair(regions)
    n_regional, n_local = math.prod(regions), math.prod(grid)
    region, members = _members(grid, regions, window)
    rows = [np.concatenate(([i], locals_)) for i, locals_ in enumerate(members)]
    right, below = (len(ys) * len(xs) for ys, xs in _paddings(grid, regions, window))
    padding = np.arange(n_regional + n_local, n_regional + n_local + right + below, dtype=np.int32)
    # Padding of one kind alone sees what the window sees.
    behind = np.full(len(padding), n_regional - 1)
    if right and below:
        rows[-1:] = [np.concatenate((rows[-1], seen)) for seen in (padding, padding[:right], padding[right:])]
        behind = np.repeat((n_regional, n_regional + 1), (right, below))
    else:
        rows[-1] = np.concatenate((rows[-1], padding))
    hint = np.concatenate((np.arange(n_regional), region, np.full(len(padding), n_regional - 1)))
    meta = {"family": "regionvit", "grid": list(grid), "n_regional": n_regional, "window": window, "mode": "windows"}
    return _ready.of_rows(rows, np.concatenate((hint[: n_regional + n_local], behind)), meta, hint)


def places(side: int | tuple[int, int], regions: int | tuple[int, int], window: int) -> np.ndarray:
    """Row and column, int64 [2, N - R], of the tokens of `windows` that follow its R regional tokens.

    side, regions: as `windows` takes them.
    """
    grid, regions = sides.pair(side), sides.pair(regions)
    parts = [np.meshgrid(ys, xs, indexing="ij") for ys, xs in _paddings(grid, regions, window)]
    return np.concatenate([np.reshape(np.asarray(part), (2, -1)) for part in (np.indices(grid), *parts)], axis=1)


def _paddings(grid, regions, window):
    """Rows and columns, int64 each, of the last window's padding: to the right of the image, and below it."""
    axes = list(zip(grid, regions, strict=True))
    ys, xs = (np.arange((r - 1) * window, n) for n, r in axes)
    below, right = (np.arange(n, r * window) for n, r in axes)
    return (ys, right), (below, xs)


def _members(grid, regions, w):
    """Region of each local token, row by row, and for each region the ids of its local tokens.

    grid, regions: rows and columns of local and of regional tokens.
    """
    ys, xs = (np.arange(n, dtype=np.int32) for n in grid)
    down, across = ([at[at // w == i] for i in range(r)] for at, r in zip((ys, xs), regions, strict=True))
    region = (ys // w)[:, None] * regions[1] + xs // w
    first, columns = math.prod(regions), grid[1]
    return region.ravel(), [first + np.add.outer(columns * y, x).ravel() for y in down for x in across]


def offset_index(dy: Any, dx: Any, window: int) -> Any:
    """Index in ``rel_pos`` of key minus query within a window, for arrays and tensors of whole numbers.

    The published index is ``[dy + w//2, dx + w//2]`` with negative values counted from the end, which is a bijection of
    the offsets; weights need it as it is.
    """
    width = 2 * window - 1
    return (dy + window // 2) % width * width + (dx + window // 2) % width


def size(params: Params) -> int:
    """Tokens and entries of the distinct rows: of each region a row for its token and one for its locals."""
    regions, local = params.regions**2, params.side**2
    entries = regions + local if params.part == "windows" else regions * regions + regions + 2 * local
    return regions + local + entries
