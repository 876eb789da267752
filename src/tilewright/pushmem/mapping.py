"""From a program to a mapped program: schedule, wires, registers, tiles and PEs."""

import time
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.pushmem import memories, orders, rates, stencil
from tilewright.pushmem.errors import CapacityError, MappingError, ProgramError
from tilewright.pushmem.extract import check_ranges, extract
from tilewright.pushmem.pack import TileUse, pack
from tilewright.pushmem.program import Program, lower
from tilewright.pushmem.shift import REGISTER_THRESHOLD, Wiring, wire
from tilewright.pushmem.stencil import Schedule

# Waits that are tried beyond the first that fits, where weights may then share tiles; ResNet's layer needs five.
_MORE = 6
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


def compile(
    outputs,
    memory: str = "pub",
    *,
    threshold: int = REGISTER_THRESHOLD,
    retries: int = 32,
    overlap: bool = True,
) -> Mapped:
    """The program of the stages `outputs`, mapped to tiles of the kind `memory`.

    Where no schedule keeps an SRAM port free of conflicts, rows get a cycle longer (stencils), then buffers whose
    distances vary wait a cycle longer. Images that a reduction reads come at its pace where a tile cannot hold them
    else, and what still is too large for a tile is kept by a chain of them. Of a program that reduces in time, the
    mapping with the fewest tiles, then cycles, is taken. Where a stage asks for the order ``auto``, each legal order is
    mapped so, and the one of fewest cycles, then tiles, is taken; an order that cannot end earlier than one that is
    mapped is left out. Raises `ProgramError`, `MappingError` and `UnknownNameError`.
    """
    begin = time.perf_counter()
    lowered = lower(outputs)
    asked = orders.choices(lowered)
    if len(asked) == 1:
        made = _compiled(extract(orders.reordered(lowered, asked[0])), memory, threshold, retries, overlap)
        return replace(made, seconds=time.perf_counter() - begin)
    check_ranges(lowered)
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
            made = _compiled(extract(program), memory, threshold, retries, overlap)
        except (MappingError, ProgramError) as found:
            error = error or found
            continue
        if best is None or _rank(made) < _rank(best):
            best = made
    if best is None:
        raise MappingError(f"no mapping in any of {len(asked)} orders; the first one: {error}")
    return replace(best, seconds=time.perf_counter() - begin)


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
        edges, ends = stencil.gaps(program, strides), [0]
        for s in program.statements:
            starts[s.name] = max([0, *(starts[e.buffer] - e.low for e in edges if e.statement == s.name)])
            if s.name in program.outputs:
                own, offset = stencil.written(program, strides, s.name)
                inner = sum(k * (e - 1) for k, e in zip(own, s.extents, strict=False))
                ends.append(starts[s.name] + offset + inner)
        least.append(max(ends))
    return min(least)


def _compiled(program: Program, memory: str, threshold: int, retries: int, overlap: bool = True) -> Mapped:
    """The mapping of a program with ports, whose loops are in order."""
    tile = memories.member(memory).PARAMETERS
    coarse = rates.is_coarse(program)
    error: MappingError | None = None
    best: Mapped | None = None
    found_at, tried = retries, 0
    too_large: set[tuple[bool, bool]] = set()
    for way in _ways(program, coarse, tile.fetch, overlap):
        if best is not None:
            break
        if way.tiles > 1 and not way.whole and (way.paced, way.overlap) not in too_large:
            # A chain helps what no tile holds, and nothing else.
            continue
        paced = way.paced
        for attempt in range(retries):
            pad, wait = (0, attempt) if paced or way.whole else (attempt % 4, attempt // 4)
            if wait > found_at + _MORE:
                break
            strides = (
                rates.coarse(program, pad, tile.fetch, paced, way.overlap) if coarse else rates.stencil(program, pad)
            )
            rates.check(program, strides)
            # The least latency of a word through a tile: three more words to fill, then write, fetch and read.
            fill = 4 if memory == "pub" else 0
            slack = {
                n: 2 + fill + wait + (1 if memory == "pub" else 0) + fill * (max(1, _pace(strides[n])) - 1)
                for n in program.buffers
            }
            whole = _whole(program, strides, slack) if way.whole else None
            plan = stencil.schedule(program, strides, "coarse" if coarse else "stencil", slack, whole)
            tried += 1
            try:
                wiring, tiles = _stored(program, plan, memory, threshold, way.tiles)
            except CapacityError as found:
                # Waiting longer makes it no smaller.
                error = found
                too_large.add((way.paced, way.overlap))
                break
            except MappingError as found:
                error = found
                continue
            mapped = Mapped(_scheduled(program, plan), plan, wiring, tuple(tiles), sum(map(_pes, program.statements)))
            _fits(mapped)
            if not coarse:
                return mapped
            # Whether weights share tiles depends on when they are read: a few more schedules show it.
            found_at = min(found_at, wait)
            if best is None or (len(tiles), plan.last_cycle) < (len(best.tiles), best.schedule.last_cycle):
                best = mapped
    if best is not None:
        return best
    raise MappingError(f"no mapping after {tried} schedules; the last one: {error}")


@dataclass(frozen=True)
class _Way:
    """How a program may be scheduled. paced: images come at the pace of the reduction that reads them. tiles: of the
    longest chain. whole: a buffer whose distances vary is read once all of it was written, so that no write meets a
    read. overlap: stages work on iterations of their common outer loop that follow each other, and buffers between them
    are double."""

    paced: bool = False
    tiles: int = 1
    whole: bool = False
    overlap: bool = False


def _ways(program, coarse, fetch, overlap) -> list[_Way]:
    """The ways to try, the one that needs fewest tiles first."""
    if not coarse:
        return [_Way(), _Way(tiles=MEMORY_TILES)]
    shared = overlap and rates.has_outer(program)
    usual, other = (rates.coarse(program, 0, fetch, paced, shared) for paced in (False, True))
    paces = [False, True] if usual != other else [False]
    alone = [_Way(paced) for paced in paces]
    chains = [_Way(paced, MEMORY_TILES) for paced in reversed(paces)]
    found = [*alone, *chains, _Way(tiles=MEMORY_TILES, whole=True)]
    if shared:
        # Images that come in one burst an iteration meet the reads of the one before: paced first.
        overlapped = sorted((way for way in found if not way.whole), key=lambda way: (way.tiles, not way.paced))
        return [*(replace(way, overlap=True) for way in overlapped), *found]
    return found


def _whole(program, strides, slack) -> dict[str, int]:
    """Cycles from the start of a buffer's writes until all its words can be read."""
    found = {}
    for name, buffer in program.buffers.items():
        steps, offset = stencil.written(program, strides, name)
        found[name] = offset + sum(k * (e - 1) for k, e in zip(steps, buffer.shape, strict=True)) + slack[name]
    return found


def _stored(program, plan, memory, threshold, most):
    """``(wiring, tiles)`` with banks, or with copies of buffers where these need fewer tiles or banks fit none."""
    tile, error, found = memories.member(memory).PARAMETERS, None, []
    for banked in (True, False):
        made = None
        try:
            made = wire(program, plan, tile.fetch, tile.depth * tile.fetch, threshold, banked, most)
            found.append((made, pack(memory, made.uses)))
        except MappingError as reason:
            error = reason
        if made is not None and not made.banks:
            break
    if error is not None and not found:
        raise error
    return min(found, key=lambda each: len(each[1]))


def _scheduled(program: Program, plan: Schedule) -> Program:
    """`program` whose ports know when they move words: a write of a reduction with its last iteration."""
    maps = {s.name: plan.map(s) for s in program.statements}
    for n in program.inputs:
        axes = [f"i{d}" for d in range(len(program.buffers[n].shape))]
        time_ = " + ".join([*(f"{k}*{a}" for k, a in zip(plan.strides[n], axes, strict=True)), str(plan.starts[n])])
        maps[n] = f"{{ {n}[{', '.join(axes)}] -> [{time_}] }}"
    buffers = {
        n: replace(b, ports=tuple(replace(p, schedule=maps[p.statement]) for p in b.ports))
        for n, b in program.buffers.items()
    }
    return replace(program, buffers=buffers)


def _fits(mapped: Mapped) -> None:
    """Raise `MappingError` for more tiles or PEs than the array has, and for a controller that waits longer than its
    counter tells."""
    tiles, pes = len(mapped.tiles), mapped.pes
    if tiles > MEMORY_TILES or pes > PES:
        raise MappingError(f"needs {tiles} memory tiles and {pes} PEs; the array has {MEMORY_TILES} and {PES}")
    program, plan = mapped.program, mapped.schedule
    extents = {n: program.buffers[n].shape for n in program.inputs} | {s.name: s.extents for s in program.statements}
    controllers = [(n, e[::-1], plan.starts[n], plan.strides[n][::-1]) for n, e in extents.items()]
    controllers += [
        (f"{name} of {t.buffers[0]}", g.extents, *g.cycle) for t in mapped.tiles for name, g in t.controllers.items()
    ]
    for name, counts, start, strides in controllers:
        inner = np.cumsum([0, *((e - 1) * s for e, s in zip(counts, strides, strict=True))])
        gap = max([0, *(s - i for e, s, i in zip(counts, strides, inner, strict=False) if e > 1)])
        if start >= COUNTER or gap > COUNTER:
            raise MappingError(
                f"{name}: starts at cycle {start} and waits {gap} cycles at most; a counter tells {COUNTER} apart"
            )


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
