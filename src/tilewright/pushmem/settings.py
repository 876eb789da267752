"""Configurations of a tile: for each controller its loops, its schedule and its addresses.

An affine value is ``start + sum(stride_l * i_l)`` modulo two to its width; i_l counts the loop l, innermost first, up
to ``extent_l - 1``. A controller without loops fires once; one that is not in the configuration never does.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.pushmem.memories import Memory

# Of a schedule, and of the counter of cycles that it is compared with.
CYCLE, CYCLE_BITS = "cycle", 16

Extent = Annotated[int, msgspec.Meta(ge=2)]


def generate(extents: Sequence[int], strides: Sequence[int], start: int = 0) -> np.ndarray:
    """int64 [iterations]: ``start + sum(stride_l * i_l)`` in the order of the loops, innermost first."""
    values = np.zeros(1, np.int64)
    for extent, stride in zip(extents, strides, strict=True):
        values = (np.arange(extent)[:, None] * stride + values[None, :]).ravel()
    return values + start


class Affine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value for each iteration: see the module."""

    start: int
    strides: tuple[int, ...] = ()

    def at(self, extents: Sequence[int], bits: int) -> np.ndarray:
        """int64 [iterations]: the values, modulo ``2**bits``."""
        return generate(extents, self.strides, self.start) % (1 << bits)

    def stored(self, bits: int) -> "Affine":
        """The same values modulo ``2**bits``, of numbers that so many bits hold."""
        mask = (1 << bits) - 1
        return Affine(self.start & mask, tuple(stride & mask for stride in self.strides))


class Controller(msgspec.Struct, frozen=True):
    """Loops, innermost first, and what steps with them. addresses: by their names, such as ``agg`` or ``sram``."""

    extents: tuple[Extent, ...]
    cycle: Affine
    addresses: dict[str, Affine]

    def __post_init__(self) -> None:
        for name, affine in {CYCLE: self.cycle, **self.addresses}.items():
            if len(affine.strides) != len(self.extents):
                raise ConfigError(f"{name}: expected {len(self.extents)} strides, found {len(affine.strides)}")

    def document(self) -> dict:
        """As it stands in a file."""
        named = {CYCLE: self.cycle, **self.addresses}
        return {"extents": list(self.extents)} | {name: msgspec.to_builtins(affine) for name, affine in named.items()}


class Configuration(msgspec.Struct, frozen=True):
    """A tile's controllers, by their names. memory: the name of the tile."""

    memory: str
    controllers: dict[str, Controller]

    def check(self, memory: Memory) -> None:
        """Raise `ConfigError` unless this is a configuration of `memory`, a member of `memories`."""
        if self.memory != memory.NAME:
            raise ConfigError(f"configuration: expected one of the memory {memory.NAME}, found one of {self.memory}")
        ports = memory.PARAMETERS.ports()
        for name, controller in self.controllers.items():
            if name not in ports:
                raise ConfigError(
                    f"configuration: unknown controller {name!r} of {self.memory}; known: {', '.join(ports)}"
                )
            wanted = ports[name].addresses
            if list(controller.addresses) != list(wanted):
                raise ConfigError(
                    f"{name}: expected the addresses {', '.join(wanted)}, found {', '.join(controller.addresses)}"
                )
            if len(controller.extents) > memory.PARAMETERS.levels:
                raise ConfigError(
                    f"{name}: expected at most {memory.PARAMETERS.levels} loops, found {len(controller.extents)}"
                )
            for what, bits in {CYCLE: CYCLE_BITS, **wanted}.items():
                affine = controller.cycle if what == CYCLE else controller.addresses[what]
                for value in (affine.start, *affine.strides):
                    if not 0 <= value < 1 << bits:
                        raise ConfigError(f"{name}.{what}: expected numbers from 0 to {(1 << bits) - 1}, found {value}")
            for extent in controller.extents:
                if extent > 1 << CYCLE_BITS:
                    raise ConfigError(f"{name}: expected extents of at most {1 << CYCLE_BITS}, found {extent}")
