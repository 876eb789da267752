"""From a program to a mapped program: schedule, wires, registers, tiles and PEs."""

import re
import time
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.pushmem import dsl, memories, orders, rates, schedule
from tilewright.pushmem.errors import CapacityError, MappingError, ProgramError
from tilewright.pushmem.lowering import lower
from tilewright.pushmem.pack import TileUse, pack
from tilewright.pushmem.program import Program, by_indices
from tilewright.pushmem.schedule import Schedule
from tilewright.pushmem.settings import Affine, Controller
from tilewright.pushmem.wiring import REGISTER_THRESHOLD, Wiring, wire

# Waits that are tried beyond the first that fits, where weights may then share tiles; ResNet's layer needs five.
# Schedules that are tried for each way.
_MORE, _RETRIES = 6, 32
PES = 384
MEMORY_TILES = 128
# Cycles that the counter of a tile and of a PE tells apart.
COUNTER = 1 << 16


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


def compile(outputs: dsl.Outputs, memory: str = "pub", *, threshold: int = REGISTER_THRESHOLD) -> Mapped:
    """Map a program to memory tiles, registers and processing elements.

    Parameters
    ----------
    outputs : Stage or iterable of Stage
        Outputs of the program.
    memory : str
        Kind of the memory tiles, ``pub`` or ``dp``.
    threshold : int
        Cycles of delay from which on a word is kept by a tile, and no longer by registers.

    Returns
    -------
    Mapped
        `Mapped.tiles`, `Mapped.pes`, `Mapped.registers` and `Mapped.schedule` describe the mapping.

    Raises
    ------
    ProgramError
        For a program with an error.
    MappingError
        For a program that does not fit the array.
    UnknownNameError
        For a memory that is unknown.

    Notes
    -----
    If an SRAM port has conflicts, the rows of stencils, and then the waits of other buffers, get a cycle longer until
    there are none. Streams that no tile serves together then get a tile each. A buffer that is too large for a tile is
    kept by a chain of tiles. Of a program that reduces in time, the mapping with the fewest tiles, then cycles, is
    taken; of the orders of ``auto``, the one with the fewest cycles, then tiles.
    """
    begin = time.perf_counter()
    lowered = lower(outputs)
    try:
        made = _mapped(lowered, memory, threshold)
    except MappingError as error:
        raise MappingError(f"{error}; {_elsewhere(lowered, memory, threshold)}") from error
    return replace(made, seconds=time.perf_counter() - begin)


def _elsewhere(lowered: Program, memory: str, threshold: int) -> str:
    """Which other memories of the family the program fits."""
    found = []
    for other in (name for name in memories.NAMES if name != memory):
        try:
            found.append(f"the memory {other} takes it, {len(_mapped(lowered, other, threshold).tiles)} tiles")
        except (MappingError, ProgramError):
            found.append(f"the memory {other} does not take it either")
    return ", ".join(found)


def _mapped(lowered: Program, memory: str, threshold: int) -> Mapped:
    """The mapping in the best order. Raises `MappingError`."""
    asked = orders.choices(lowered)
    if len(asked) == 1:
        return _compiled(orders.reordered(lowered, asked[0]), memory, threshold)
    bounds, best = [], None
    error: Exception | None = None
    for k, each in enumerate(asked):
        program = orders.reordered(lowered, each)
        try:
            bounds.append((_least_cycles(program, memory), k, program))
        except ProgramError as found:
            error = found
    bounds.sort(key=lambda b: b[:2])
    for cycles, _, program in bounds[: orders.MOST]:
        if best is not None and cycles >= best.schedule.last_cycle:
            break
        try:
            made = _compiled(program, memory, threshold)
        except (MappingError, ProgramError) as found:
            error = error or found
            continue
        if best is None or _rank(made) < _rank(best):
            best = made
    if best is None:
        raise MappingError(f"no mapping in any of {len(asked)} orders; the first one: {error}")
    return best


def _rank(mapped: Mapped) -> tuple[int, int]:
    """The fewer the better: cycles, then tiles."""
    return mapped.schedule.last_cycle, len(mapped.tiles)


def _least_cycles(program: Program, memory: str) -> int:
    """The last cycle where every stage starts as soon as its words are written: no mapping of these loops ends earlier.

    A longer pitch of inputs and the waits for memory only move starts to later cycles.
    """
    fetch = memories.member(memory).PARAMETERS.fetch
    least = []
    for paced in (False, True):
        strides = rates.coarse(program, 0, fetch, paced)
        starts = dict.fromkeys(program.buffers, 0)
        edges, ends = schedule.gaps(program, strides), [0]
        for s in program.statements:
            starts[s.name] = max([0, *(starts[e.buffer] - e.low for e in edges if e.statement == s.name)])
            if s.name in program.outputs:
                ends.append(starts[s.name] + schedule.finished(program, strides, s.name))
        least.append(max(ends))
    return min(least)


def _compiled(program: Program, memory: str, threshold: int) -> Mapped:
    """The mapping of a program whose loops are in order."""
    error: MappingError | None = None
    best: Mapped | None = None
    found_at, tried = _RETRIES, 0
    too_large: set[tuple[bool, bool]] = set()
    for way in _ways(program, memories.member(memory).PARAMETERS.fetch):
        if best is not None:
            break
        if way.tiles > 1 and not (way.whole or way.split) and (way.paced, way.overlap) not in too_large:
            # A chain helps what no tile holds, and nothing else.
            continue
        for attempt in range(_RETRIES):
            pad, wait = (0, attempt) if way.paced or way.whole else (attempt % 4, attempt // 4)
            if wait > found_at + _MORE:
                break
            plan = _scheduled(program, memory, way, pad, wait)
            tried += 1
            try:
                mapped = _stored(program, plan, memory, threshold, way)
            except MappingError as found:
                # What came before a tile for each stream says more.
                error = error if way.split and error is not None else found
                if isinstance(found, CapacityError):
                    # Waiting longer makes it no smaller.
                    too_large.add((way.paced, way.overlap))
                    break
                continue
            try:
                _fits(mapped)
            except MappingError:
                if way.split and error is not None:
                    break
                raise
            if not rates.is_coarse(program):
                return mapped
            # Whether weights share tiles depends on when they are read: a few more schedules show it.
            found_at = min(found_at, wait)
            if best is None or (len(mapped.tiles), plan.last_cycle) < (len(best.tiles), best.schedule.last_cycle):
                best = mapped
    if best is not None:
        return best
    raise MappingError(f"no mapping after {tried} schedules; the last one: {error}")


def _scheduled(program: Program, memory: str, way: "_Way", pad: int, wait: int) -> Schedule:
    """The schedule of a way. pad: cycles that rows are longer; wait: that buffers whose distances vary wait longer."""
    tile, coarse = memories.member(memory).PARAMETERS, rates.is_coarse(program)
    strides = rates.coarse(program, pad, tile.fetch, way.paced, way.overlap) if coarse else rates.stencil(program, pad)
    rates.check(program, strides)
    # The least latency of a word through a tile: three more words to fill, then write, fetch and read.
    fill, least = (4, 7) if memory == "pub" else (0, 2)
    slack = {n: least + wait + fill * (max((1, *strides[n][-1:])) - 1) for n in program.buffers}
    whole = {n: schedule.finished(program, strides, n) + slack[n] for n in program.buffers} if way.whole else None
    return schedule.schedule(program, strides, slack, whole)


def _stored(program: Program, plan: Schedule, memory: str, threshold: int, way: "_Way") -> Mapped:
    """The mapping of a schedule. Raises `MappingError`."""
    tile = memories.member(memory).PARAMETERS
    wiring = wire(program, plan, tile.fetch, tile.depth * tile.fetch, threshold, way.tiles)
    try:
        tiles = tuple(pack(memory, wiring.uses, way.split))
    except MappingError as error:
        raise MappingError(f"{error}{_readers(program, wiring, str(error))}") from error
    return Mapped(program, plan, wiring, tiles, sum(map(_pes, program.statements)))


def _readers(program: Program, wiring: Wiring, text: str) -> str:
    """Which stage reads each of the signals that `text` names, and at which index of its loops."""
    found = {}
    for (name, read), signal in wiring.wires.items():
        if re.search(rf"(?<![\w.]){re.escape(signal)}(?![\w.])", text) and signal not in program.buffers:
            access = program.statement(name).reads[read]
            found[signal] = f"; {signal} is {access.buffer}[{', '.join(map(str, access.indices))}] of {name}"
    return "".join(found.values())


@dataclass(frozen=True)
class _Way:
    """How a program may be scheduled. paced: images come at the pace of the reduction that reads them. tiles: of the
    longest chain. whole: a buffer whose distances vary is read once all of it was written, so that no write meets a
    read. overlap: stages work on iterations of their common outer loop that follow each other, and buffers between them
    are double. split: streams that no tile serves together get a tile each."""

    paced: bool = False
    tiles: int = 1
    whole: bool = False
    overlap: bool = False
    split: bool = False


# What costs most tiles: only where nothing else fits.
_LAST = (_Way(tiles=MEMORY_TILES, split=True), _Way(tiles=MEMORY_TILES, whole=True, split=True))


def _ways(program: Program, fetch: int) -> list[_Way]:
    """The ways to try, the one that needs fewest tiles first."""
    if not rates.is_coarse(program):
        return [_Way(), _Way(tiles=MEMORY_TILES), *_LAST]
    shared = rates.has_outer(program)
    usual, other = (rates.coarse(program, 0, fetch, paced, shared) for paced in (False, True))
    paces = [False, True] if usual != other else [False]
    alone = [_Way(paced) for paced in paces]
    chains = [_Way(paced, MEMORY_TILES) for paced in reversed(paces)]
    found = [*alone, *chains, _Way(tiles=MEMORY_TILES, whole=True)]
    if shared:
        # Images that come in one burst an iteration meet the reads of the one before: paced first.
        overlapped = sorted((way for way in found if not way.whole), key=lambda way: (way.tiles, not way.paced))
        found = [*(replace(way, overlap=True) for way in overlapped), *found]
    return [*found, *_LAST]


def _fits(mapped: Mapped) -> None:
    """Raise `MappingError` for more tiles or PEs than the array has, and for a controller that waits longer than its
    counter tells."""
    tiles, pes = len(mapped.tiles), mapped.pes
    if tiles > MEMORY_TILES or pes > PES:
        raise MappingError(f"needs {tiles} memory tiles and {pes} PEs; the array has {MEMORY_TILES} and {PES}")
    program, plan = mapped.program, mapped.schedule
    extents = {n: program.buffers[n].shape for n in program.inputs} | {s.name: s.extents for s in program.statements}
    controllers = [
        (n, Controller(e[::-1], Affine(plan.starts[n], plan.strides[n][::-1]), {})) for n, e in extents.items()
    ]
    controllers += [(f"{name} of {t.buffers[0]}", g) for t in mapped.tiles for name, g in t.controllers.items()]
    for name, g in controllers:
        loops = list(zip(g.extents, g.cycle.strides, strict=True))
        inner = np.cumsum([0, *((e - 1) * s for e, s in loops)])
        gap = max([0, *(s - i for (e, s), i in zip(loops, inner, strict=False) if e > 1)])
        if g.cycle.start >= COUNTER or gap > COUNTER:
            raise MappingError(
                f"{name}: starts at cycle {g.cycle.start} and waits up to {gap} cycles; a counter reaches {COUNTER}"
            )


def _pes(statement) -> int:
    """PEs of a statement: one an operation; a product and the sum that takes it share one (multiply-add). What a choice
    by indices gives is computed once."""
    known = set()

    def count(e):
        if by_indices(e):
            if e in known:
                return 0
            known.add(e)
        if e[0] in ("read", "const", "index", "bits"):
            return sum(count(a) for a in e[2:]) if e[0] == "bits" else 0
        if e[0] == "lut":
            return 1 + count(e[2])
        fused = e[0] == "+" and any(a[0] == "*" for a in e[2:])
        return sum(count(a) for a in e[2:]) + (not fused)

    body = statement.expression
    return count(body) + (bool(statement.reduction) and len(statement.loops) > statement.rank and body[0] != "*")
