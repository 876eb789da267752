"""RegionViT: regional tokens that see each other, and windows that see their region (Chen et al., arXiv 2106.02689).

Each block runs the same attention twice: densely over the R regional tokens, then over every sequence [1 regional, w^2
local]. The graph is the union of the two. Regional and local grid are rounded up, so that every region has a window;
local tokens beyond the image are padding and are not part of the graph. Tokens: the regionals, row by row, then the
locals, row by row.
"""

import re
from typing import Annotated, Literal

import msgspec
import numpy as np

from tilewright.errors import ConfigError
from tilewright.graph import from_classes

NAMING = "regionvit-<variant>-<resolution>[-w14][-p<patch>]-s<stage>, e.g. regionvit-tiny-224-s1"

# Heads of stage 1; they double with each stage, as the width does.
HEADS = {"tiny": 2, "small": 3, "medium": 3, "base": 4}
HEAD_DIM = 32


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of one network. window: w, local tokens along a side of a region. resolution: pixels a side."""

    variant: Literal["tiny", "small", "medium", "base"]
    resolution: Annotated[int, msgspec.Meta(ge=1)]
    stage: Annotated[int, msgspec.Meta(ge=1, le=4)]
    patch: Annotated[int, msgspec.Meta(ge=1)] = 4
    window: Annotated[int, msgspec.Meta(ge=2)] = 7

    def __post_init__(self):
        if self.patch > self.resolution:
            raise ConfigError(f"patch: expected at most the resolution {self.resolution}, found {self.patch}")

    @property
    def side(self):
        """Local tokens along a side: the patch size, then each later stage (3 x 3, stride 2), divides and rounds up."""
        # ASSUME: rounded up at every patch size, as the three-layer stem does; the one-layer stem rounds down where 4
        # does not divide the resolution.
        return _ceil(self.resolution, self.patch << (self.stage - 1))

    @property
    def regions(self):
        """Regional tokens along a side."""
        return _ceil(self.resolution, self.patch * self.window << (self.stage - 1))


def _ceil(a, b):
    return -(-a // b)


def fields(name):
    """Parameters stated by a workload name, or None."""
    match = re.fullmatch(rf"regionvit-({'|'.join(HEADS)})-(\d+)(-w14)?(?:-p(\d+))?-s([1-4])", name)
    if not match:
        return None
    variant, resolution, wide, patch, stage = match.groups()
    stated = {"variant": variant, "resolution": int(resolution), "stage": int(stage)}
    return stated | ({"window": 14} if wide else {}) | ({"patch": int(patch)} if patch else {})


def graph(params):
    """The exact pattern: one distinct row for each regional token and one for the locals of each window."""
    n, r, w = params.side, params.regions, params.window
    at = np.arange(n, dtype=np.int32)
    region = (at // w)[:, None] * r + at // w
    regionals = np.arange(r * r, dtype=np.int32)
    spans = [at[at // w == i] for i in range(r)]
    windows = [r * r + np.add.outer(n * y, x).ravel() for y in spans for x in spans]
    rows = [np.concatenate((regionals, window)) for window in windows]
    rows += [np.concatenate((regionals[i : i + 1], window)) for i, window in enumerate(windows)]
    hint = np.concatenate((np.full(r * r, -1), region.ravel()))
    meta = {
        "family": "regionvit",
        "paper_family": "RegionViT",
        "variant": params.variant,
        "resolution": params.resolution,
        "patch": params.patch,
        "stage": params.stage,
        "heads": HEADS[params.variant] << (params.stage - 1),
        "head_dim": HEAD_DIM,
        "grid": [n, n],
        "n_regional": r * r,
        "window": w,
        "mode": "regional",
        "bias": {
            "kind": "local offsets within a window, none",
            "table_size": (2 * w - 1) ** 2,
            "slots": (2 * w - 1) ** 2 + 1,
        },
    }
    return from_classes(
        np.concatenate(([0], np.cumsum([len(row) for row in rows]))),
        np.concatenate(rows, dtype=np.int32),
        np.concatenate((regionals, r * r + region.ravel()), dtype=np.int32),
        r * r + n * n,
        meta=meta,
        row_hint=hint,
        col_hint=hint,
    )


def bias_index(params, rows, cols):
    """Slot of each (query, key) pair in a head's bias: ``rel_pos`` [(2w-1)^2], then the slot of pairs without bias.

    Only pairs of local tokens in one window carry a bias. Its published index is ``[ky - qy + w//2, kx - qx + w//2]``
    with negative values counted from the end, which is a bijection of the offsets; weights need it as it is.
    """
    rows, cols = np.broadcast_arrays(rows, cols)
    n, r, w = params.side, params.regions, params.window
    width = 2 * w - 1
    (qy, qx), (ky, kx) = np.divmod(rows - r * r, n), np.divmod(cols - r * r, n)
    biased = (rows >= r * r) & (cols >= r * r) & (qy // w == ky // w) & (qx // w == kx // w)
    local = (ky - qy + w // 2) % width * width + (kx - qx + w // 2) % width
    return np.where(biased, local, width * width)


def sources(params):
    """No file is read."""
    return []
