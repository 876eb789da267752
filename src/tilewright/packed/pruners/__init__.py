"""Which tokens of an image a network continues with, each rule as published.

Contract of a member module:
    ``Params``: a frozen `Settings` of what a user can choose.
    ``Pruner(params, width, n_tokens)``: an `nn.Module` for networks of `width` channels and images of `n_tokens`
        tokens, the class token first. Its parameters, if it has some, have the names of its official checkpoints.
        ``before``, ``inside``: the blocks (from 0) before which it prunes, and those in which it prunes between the
        attention and the MLP.
        ``forward(time, x, layout, heads) -> (x, Choice)``: the `time`-th pruning of a batch, from 0. x: tokens as
        `layout` has them (`tilewright.networks.token_layouts`). heads: q, k, v [..., H, D] of the block it prunes in,
        else None. Tokens may be given other values, in place. Nothing is asked of the device.

What an image keeps depends on that image alone, not on how the batch is laid out. Importing this package does not
import torch.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec

from tilewright.core import contents, registry
from tilewright.core.errors import ConfigError

NAMES = ("none", "threshold_l2", "dynamicvit", "evit", "ats")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can choose of a pruner; here nothing."""

    @property
    def learned(self) -> bool:
        """Whether the pruner makes no sense without weights that were learned."""
        return False


@dataclass(frozen=True)
class Choice:
    """Which tokens stay.

    keep: bool [B, L], the positions of a layout whose tokens stay, the class token's among them. least, most: bounds of
    how many tokens of an image stay, which the host knows. fused: bool [B, L], positions of keep whose token was made
    of tokens that do not stay, or None.
    """

    keep: Any
    least: int
    most: int
    fused: Any = None


def settings(name: str) -> tuple[str, ...]:
    """Names of the settings of the pruner `name`. Raises `UnknownNameError`."""
    return registry.member(__name__, "pruner", name, NAMES).Params.__struct_fields__


def parse(name: str, settings: Any) -> tuple[ModuleType, Any]:
    """``(module, Params)`` of the pruner `name` with `settings`, a dict, read strictly.

    Raises `UnknownNameError` for the name and `ConfigError` for a setting that is unknown, of a wrong type or out of
    range.
    """
    module = registry.member(__name__, "pruner", name, NAMES)
    try:
        return module, msgspec.convert(settings, module.Params)
    except msgspec.ValidationError as error:
        known = ", ".join(module.Params.__struct_fields__) or "none"
        raise ConfigError(f"pruner {name}: {contents.said(error, module.Params)}; settings: {known}") from None
