"""Memory tiles, a family. Contract of a member:

``NAME``, its name. ``PARAMETERS``: its `Parameters`.
``run(controllers, data_in, parameters, *, strict) -> Run``: the model. What it computes cycle by cycle is the same as
    what the member's RTL does, word by word. strict: raise `ConflictError` where two accesses of one port of the memory
    meet in a cycle, and where a word is read that was never written; otherwise do as the RTL, where the first in
    `Parameters.priority` wins and unwritten words are 0.
``tile(parameters) -> amaranth Elaboratable``: the RTL, see `rtl`.

Facts of the tile ``pub`` (published as the memory tile of a coarse-grained array, "Unified Buffer", TACO 2023;
"Automating System Configuration", FMCAD 2021): two inputs, each with an aggregator of four rows of four words; a memory
with one port of 512 wide words of four; two outputs, each with a transpose buffer of two rows. Effects of a controller
that fires in cycle t:

| controller | addresses | effect |
|---|---|---|
| ``in2agg<p>`` | ``agg`` | the aggregator's word takes ``data_in[p]`` at the end of t |
| ``agg2sram<p>`` | ``agg_row``, ``sram`` | the wide word takes the aggregator's row as of t, at the end of t |
| ``sram2tb<p>`` | ``sram``, ``tb_row`` | the read register takes the wide word at the end of t, the row in t + 1 |
| ``tb2out<p>`` | ``tb`` | ``data_out[p]`` is the transpose buffer's word as of t, and valid |

A tile of a chain (`chained`) has `CHAIN_BITS` more bits in each ``sram`` address. These are the number of the tile that
keeps the word: a write goes to this tile alone. All tiles of a chain have the same controllers. A word that goes out is
the tile's own where its fetch found this tile's number, and else what enters at ``chain_in<p>``: the output of the tile
before, in the same cycle.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from tilewright.core import registry
from tilewright.core.errors import TilewrightError

NAMES = ("pub", "dp")
# Of the number of a tile in a chain: the published array has 128 memory tiles.
CHAIN_BITS = 7


# By controller its firings: ``(times, {address: values})``, int64 [firings] each; see `recurrence.fired`.
Fired: TypeAlias = dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]


class ConflictError(TilewrightError):
    """Two accesses that meet at one port of a memory, or a read of a word that was never written."""


@dataclass(frozen=True)
class Port:
    """A controller's place. kind: ``in2agg`` ...; number: of the tile's input or output. addresses: ``{name:
    bits}``."""

    kind: str
    number: int
    addresses: dict[str, int]


@dataclass(frozen=True)
class Parameters:
    """Sizes of a tile. fetch: words of a wide word. depth: wide words. rows, tb_rows: of an aggregator and of a
    transpose buffer. inputs, outputs: ports. levels: loops of a controller, at most. bits: of a word. chain: bits of an
    ``sram`` address that tell the tile of a chain, above those that tell the place in it.

    kinds: the controllers' kinds in the order of data, with ``i`` where each input has one and ``o`` for outputs.
    """

    fetch: int
    depth: int
    inputs: int
    outputs: int
    rows: int = 4
    tb_rows: int = 2
    levels: int = 6
    bits: int = 16
    chain: int = 0
    kinds: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    @cached_property
    def widths(self) -> dict[str, int]:
        """Bits of each address."""
        words = {"agg": self.rows * self.fetch, "agg_row": self.rows, "sram": self.depth}
        words |= {"tb_row": self.tb_rows, "tb": self.tb_rows * self.fetch}
        widths = {name: max(1, (count - 1).bit_length()) for name, count in words.items()}
        return widths | {"sram": widths["sram"] + self.chain}

    def ports(self) -> dict[str, Port]:
        """Every controller by its name."""
        return {
            f"{kind}{number}": Port(kind, number, {name: self.widths[name] for name in addresses})
            for kind, side, addresses in self.kinds
            for number in range(self.inputs if side == "i" else self.outputs)
        }

    def priority(self) -> list[str]:
        """Controllers that share the memory's port, the first one wins: writes before reads, port 0 before 1."""
        return [name for kind in ("agg2sram", "sram2tb") for name in self.ports() if name.startswith(kind)]


@dataclass(frozen=True)
class Link:
    """A tile's place in a chain: it keeps the words whose number, of the bits in `mask`, is `index`. data: int64
    [cycles, outputs], the words at ``chain_in<p>``; None for the first tile."""

    index: int
    mask: int
    data: np.ndarray | None = None

    def owned(self, fired: Fired, parameters: Parameters) -> tuple[Fired, dict[str, np.ndarray]]:
        """``(fired, mine)``: the events at this tile's own memory, and for each controller which ones these are."""
        bits, own, mine = parameters.widths["sram"] - parameters.chain, dict(fired), {}
        for name, (times, addresses) in fired.items():
            if "sram" not in addresses:
                continue
            mine[name] = (addresses["sram"] >> bits) & self.mask == self.index
            told = {what: values[mine[name]] for what, values in addresses.items()}
            own[name] = times[mine[name]], told | {"sram": told["sram"] & ((1 << bits) - 1)}
        return own, mine


@dataclass
class Run:
    """What a tile did. data_out: int64 [cycles, outputs], 0 where not valid; valid_out: bool of the same shape. Inside,
    where the tile has them: ``rows`` [cycles, inputs, fetch] and ``rows_valid``, what each aggregator gives the memory;
    ``register`` [cycles, fetch], what the memory was last read; ``fetched`` [cycles, outputs], who reads."""

    data_out: np.ndarray
    valid_out: np.ndarray
    inside: dict[str, np.ndarray] = field(default_factory=dict)


class Memory(Protocol):
    """A member, see the family's contract; as a tile of a chain its `run` takes a `Link` besides."""

    @property
    def NAME(self) -> str:
        """Its name."""

    @property
    def PARAMETERS(self) -> Parameters:
        """Its sizes."""

    @property
    def run(self) -> Callable[..., Run]:
        """The model."""

    @property
    def tile(self) -> Callable[..., Any]:
        """The RTL."""

    def __hash__(self) -> int:
        """A member is one module, or one chain."""


def member(name: str) -> Memory:
    """The module of a memory. Raises `UnknownNameError`."""
    return cast(Memory, registry.member(__name__, "memory", name, NAMES))


@dataclass(frozen=True)
class _Chained:
    NAME: str
    PARAMETERS: Parameters
    run: Callable[..., Run]
    tile: Callable[..., Any]


def chained(name: str) -> Memory:
    """The memory `name` as a tile of a chain. Raises `UnknownNameError`."""
    one = member(name)
    parameters = replace(one.PARAMETERS, chain=CHAIN_BITS)

    def run(fired, data_in, parameters=parameters, **options):
        return one.run(fired, data_in, parameters, **options)

    def tile(parameters=parameters):
        return one.tile(parameters)

    return _Chained(one.NAME, parameters, run, tile)
