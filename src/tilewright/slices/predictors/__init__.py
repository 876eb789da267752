"""Which keys a group of queries attends to: rules that tell the share of its attention that each key will get.

Contract of a member module:
    ``Params``: a frozen `Settings` of what a user can choose.
    ``group_bytes(params, layout, head_dim) -> int``: memory that the codes of a group take, and what they are made of.
    ``codes(selection, q, k, params, *, scale, **tensors) -> uint8 [B, H, G, N_k]``: codes of the shares, see
        `tilewright.slices.selection`. selection: that of the device where q and k lie; all code of a device is its. q
        [B, H, N_q, D], k [B, H, N_k, D]: views, maybe of some heads or groups only. tensors: those of ``Params.takes``,
        cut likewise; None where none was given.
    ``mask(params, layout, device) -> bool [1, 1, G, N_k]``, where ``Params.takes`` names the mask: what is used where
        none was given.

Nothing is asked of the device. Importing this package does not import torch.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from tilewright.core import contents, registry
from tilewright.core.errors import ConfigError

if TYPE_CHECKING:
    from tilewright.slices.layout import Layout

NAMES = ("pooled", "column", "blocks", "given", "random")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user can choose of a predictor; here nothing.

    takes: names of tensors that the predictor takes beside q and k: ``lse``, ``mask``, ``lengths``. free: a key of code
    0 is listed without its mass being counted. known: the keys of code 0 are the list, and no mass, share or threshold
    chooses among them.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    free: ClassVar[bool] = False
    known: ClassVar[bool] = False

    def check(self, layout: "Layout") -> None:
        """Raise `ConfigError` for settings that do not fit a layout."""

    def fitted(self, layout: "Layout", ranked: bool) -> "Settings":
        """These settings for lists of a layout. ranked: no more than the order of a group's shares decides."""
        return self


def parse(name: str, settings: dict[str, Any]) -> tuple[ModuleType, Any]:
    """``(module, Params)`` of the predictor `name` with `settings`, a dict, read strictly.

    Raises `UnknownNameError` for the name and `ConfigError` for a setting that is unknown, of a wrong type or out of
    range.
    """
    module = registry.member(__name__, "predictor", name, NAMES)
    try:
        return module, msgspec.convert(settings, module.Params)
    except msgspec.ValidationError as error:
        known = ", ".join(module.Params.__struct_fields__) or "none"
        raise ConfigError(f"predictor {name}: {contents.said(error, module.Params)}; settings: {known}") from None


def check_part(name: str, value: int, rows: int) -> None:
    """Raise `ConfigError` unless `value` is a power of two from 1 to the rows of a group."""
    if not 1 <= value <= rows or value & (value - 1):
        raise ConfigError(f"{name}: expected a power of two from 1 to the {rows} rows of a group, found {value}")
