"""How the plans of a network's attention ``tilewright`` are made."""

import msgspec

from tilewright.core import registry

# What checks and lists names does not run.
APART = (
    "tilewright.attention.blocks",
    "tilewright.attention.blocks.tiles",
    "tilewright.attention.reorder",
    "tilewright.attention.schedule.search",
)


class Plans(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How attention tilewright plans all patterns of a network; values as `tilewright.plan` takes them.

    reorder: the order that tokens enter once a stage
    solver: what finds schedules
    tiles: tiles that they choose from; none stands for the device's own
    """

    reorder: str = "window"
    solver: str = "highs"
    tiles: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `UnknownNameError` or `TileError` for a name that is none."""
        from tilewright.attention import reorder
        from tilewright.attention.blocks.tiles import parse
        from tilewright.attention.schedule.search import NAMES as SOLVERS

        registry.check("order", self.reorder, reorder.NAMES)
        registry.check("solver", self.solver, SOLVERS)
        for name in self.tiles:
            parse(name)
