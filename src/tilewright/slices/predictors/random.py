"""Any keys: for timing alone, with ``keep``."""

from typing import Annotated

import msgspec

from tilewright.slices.predictors import Settings


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """seed: other keys for another one."""

    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0


def group_bytes(params, layout, head_dim):
    """See the contract."""
    return layout.keys


def codes(selection, q, k, params, *, scale):
    """See the contract."""
    return selection.random(params.seed)
