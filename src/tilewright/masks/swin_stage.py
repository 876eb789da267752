"""The windows of a stage of a Swin network with UPerNet, plain or shifted, with the bias of its attention.

Tokens are those of the stage's grid, padded to whole windows: the code for segmentation pads them behind the norm, so
that padding is seen (sources: `tilewright.masks.swin`, which has windows over any grid).
"""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import swin

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "swin-<tiny|small|base>-<size or height x width>-s<stage>[-shifted], e.g. swin-tiny-512-s1"

# Of all variants and stages.
HEAD_DIM = 32


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of one network. resolution: pixels a side, or (height, width). shifted: its other windows, of every
    second block. head_dim: default as published."""

    variant: str
    resolution: int | tuple[int, int]
    stage: Annotated[int, msgspec.Meta(ge=1, le=4)]
    shifted: bool = False
    head_dim: Annotated[int, msgspec.Meta(ge=1)] = HEAD_DIM

    def __post_init__(self) -> None:
        if self.variant not in swin.VARIANTS:
            raise ConfigError(f"variant: expected one of {', '.join(swin.VARIANTS)}, found {self.variant!r}")
        if min(self.pixels) < swin.LEAST:
            raise ConfigError(f"resolution: expected at least {swin.LEAST} pixels a side, found {self.resolution}")

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of images."""
        return sides.pair(self.resolution)

    @property
    def grid(self) -> Any:
        """Rows and columns of tokens, those of whole windows."""
        grid = swin.grids(self.pixels)[self.stage - 1]
        return tuple(-(-side // swin.WINDOW) * swin.WINDOW for side in grid)


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    known, size = "|".join(swin.VARIANTS), f"(?P<resolution>{sides.SIZE})"
    found = sides.stated(rf"swin-(?P<variant>{known})-{size}-s(?P<stage>[1-4])(?P<shifted>-shifted)?", name)
    return found and found | {"shifted": "shifted" in found}


def graph(params: Params) -> "Graph":
    """The exact pattern: a distinct row for each window; shifted, those at the edges are smaller."""
    meta = {
        "family": "swin_stage",
        "paper_family": None,
        "variant": params.variant,
        "resolution": max(params.pixels),
        "stage": params.stage,
        "heads": swin.VARIANTS[params.variant].heads << (params.stage - 1),
        "head_dim": params.head_dim,
        "grid": list(params.grid),
        "window": swin.WINDOW,
        "mode": "shifted" if params.shifted else "plain",
        "bias": {
            "kind": "offsets within a window, none",
            "table_size": (2 * swin.WINDOW - 1) ** 2,
            "slots": (2 * swin.WINDOW - 1) ** 2 + 1,
        },
    }
    return swin.pattern(params.grid, swin.WINDOW, swin.WINDOW // 2 * params.shifted, meta)


def size(params: Params) -> int:
    """Tokens, and each of them in one window."""
    return 2 * params.grid[0] * params.grid[1]
