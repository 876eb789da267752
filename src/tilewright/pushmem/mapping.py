"""From a program to a mapped program: schedule, wires, registers, tiles and PEs."""

import time
from dataclasses import dataclass, field, replace

from tilewright.pushmem import memories, rates, stencil
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.extract import extract
from tilewright.pushmem.pack import TileUse, pack
from tilewright.pushmem.program import Program, lower
from tilewright.pushmem.shift import REGISTER_THRESHOLD, Wiring, wire
from tilewright.pushmem.stencil import Schedule

# Waits that are tried beyond the first that fits, where weights may then share tiles; ResNet's layer needs five.
_MORE = 6
PES = 384
MEMORY_TILES = 128


@dataclass(frozen=True)
class Mapped:
    """A program on the array."""

    program: Program
    schedule: Schedule
    wiring: Wiring
    tiles: tuple[TileUse, ...]
    pes: int
    seconds: float = field(compare=False, default=0.0)

    @property
    def registers(self) -> int:
        """Words of all shift registers."""
        return sum(d.cycles for d in self.wiring.delays)


def compile(outputs, memory: str = "pub", *, threshold: int = REGISTER_THRESHOLD, retries: int = 32) -> Mapped:
    """The program of the stages `outputs`, mapped to tiles of the kind `memory`.

    Where no schedule keeps an SRAM port free of conflicts, rows get a cycle longer (stencils), then buffers whose
    distances vary wait a cycle longer. Of a program that reduces in time, the mapping with the fewest tiles, then
    cycles, is taken. Raises `ProgramError`, `MappingError` and `UnknownNameError`.
    """
    begin = time.perf_counter()
    tile = memories.member(memory).PARAMETERS
    program = extract(lower(outputs))
    coarse = rates.is_coarse(program)
    error: MappingError | None = None
    best: Mapped | None = None
    found_at = retries
    for attempt in range(retries):
        pad, wait = attempt % 4, attempt // 4
        if wait > found_at + _MORE:
            break
        strides = rates.coarse(program, pad, tile.fetch) if coarse else rates.stencil(program, pad)
        # The least latency of a word through a tile: three more words to fill, then write, fetch and read.
        fill = 4 if memory == "pub" else 0
        slack = {
            n: 2 + fill + wait + (1 if memory == "pub" else 0) + fill * (max(1, _pace(strides[n])) - 1)
            for n in program.buffers
        }
        plan = stencil.schedule(program, strides, "coarse" if coarse else "stencil", slack)
        wiring = wire(program, plan, tile.fetch, tile.depth * tile.fetch, threshold)
        try:
            tiles = pack(memory, wiring.uses)
        except MappingError as found:
            error = found
            continue
        pes = sum(map(_pes, program.statements))
        if len(tiles) > MEMORY_TILES or pes > PES:
            raise MappingError(f"needs {len(tiles)} memory tiles and {pes} PEs; the array has {MEMORY_TILES} and {PES}")
        mapped = Mapped(program, plan, wiring, tuple(tiles), pes, time.perf_counter() - begin)
        if not coarse:
            return mapped
        # Whether weights share tiles depends on when they are read: a few more schedules show it.
        found_at = min(found_at, wait)
        if best is None or (len(tiles), plan.last_cycle) < (len(best.tiles), best.schedule.last_cycle):
            best = mapped
    if best is not None:
        return replace(best, seconds=time.perf_counter() - begin)
    raise MappingError(f"no mapping after {retries} schedules; the last one: {error}")


def _pace(strides) -> int:
    return strides[-1] if strides else 1


def _pes(statement) -> int:
    """PEs of a statement: one an operation; a product and the sum that takes it share one (multiply-add)."""

    def count(e):
        if e[0] in ("read", "const", "index", "bits"):
            return sum(count(a) for a in e[2:]) if e[0] == "bits" else 0
        if e[0] == "lut":
            return 1 + count(e[2])
        fused = e[0] == "+" and any(a[0] == "*" for a in e[2:])
        return sum(count(a) for a in e[2:]) + (not fused)

    body = statement.expression
    return count(body) + (bool(statement.reduction) and len(statement.loops) > statement.rank and body[0] != "*")
