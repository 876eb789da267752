"""Any keys: for timing alone, with ``keep``."""

from typing import TYPE_CHECKING, Annotated

import msgspec

from tilewright.slices.predictors import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.slices.cpu.selection import Selection
    from tilewright.slices.layout import Layout


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """seed: other keys for another one."""

    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0


def group_bytes(params: Params, layout: "Layout", head_dim: int) -> int:
    """See the contract."""
    return layout.keys


def codes(selection: "Selection", q: "Tensor", k: "Tensor", params: Params, *, scale: float) -> "Tensor":
    """See the contract."""
    return selection.random(params.seed)
