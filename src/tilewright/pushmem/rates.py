"""Strides of time: how many cycles apart neighbouring words of each buffer and iterations of each statement are.

`stencil` solves the balance equations of all accesses, so that all stages share one raster. `coarse` runs reductions
one iteration a cycle, and gives what reads their results the pace of those results.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.program import Program, Statement


def is_coarse(program: Program) -> bool:
    """Whether no common raster holds the program: a statement reduces in time, turns a buffer or reads it backwards,
    or rates do not balance."""
    if any(len(s.loops) > s.rank or turns(s) for s in program.statements):
        return True
    try:
        check(program, stencil(program))
    except ProgramError:
        return True
    return False


def turns(statement: Statement) -> bool:
    """Whether a read names the loops in another order than the statement, as a transposition does."""
    place = {n: d for d, n in enumerate(statement.loops)}
    for read in statement.reads:
        used = [max((place[n] for n in i.names() if i.slope(n)), default=-1) for i in read.indices]
        used = [d for d in used if d >= 0]
        if used != sorted(used):
            return True
    return False


def raster(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a box, a word a cycle, row by row."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _relations(program):
    """``(producer, its dimension, consumer, its dimension, slope)`` of every access in one loop variable."""
    for s in program.statements:
        for read in s.reads:
            for d, i in enumerate(read.indices):
                names = [n for n in i.names() if i.slope(n)]
                if len(names) == 1 and names[0] in s.loops[: s.rank]:
                    yield read.buffer, d, s.name, s.loops.index(names[0]), i.slope(names[0])


def _axes(program) -> dict[str, tuple[int, ...]]:
    """For each dimension of a buffer, that of the raster: what all rows of an image read goes along its columns."""
    depth = max(len(b.shape) for b in program.buffers.values())
    axes = {n: tuple(range(len(b.shape))) for n, b in program.buffers.items()}
    order = [*program.inputs, *(s.name for s in program.statements)]
    for name in reversed(order):
        if len(axes[name]) < depth:
            found = {d: axes[c][e] for p, d, c, e, _ in _relations(program) if p == name}
            along = tuple(found.get(d, -1) for d in axes[name])
            if -1 not in along and list(along) == sorted(set(along)):
                axes[name] = along
    return axes


def stencil(program: Program, pad: int = 0) -> dict[str, tuple[int, ...]]:
    """Strides in cycles of each buffer's dimensions; rows are `pad` cycles longer than they need be.

    Raises `ProgramError` where the balance equations have no solution.
    """
    relations, axes = list(_relations(program)), _axes(program)
    for p, d, c, e, slope in relations:
        if axes[p][d] != axes[c][e] or slope <= 0:
            raise ProgramError(
                f"{c}: reads {p} with slope {slope} from dimension {e} to {d}: no raster order has such a slope"
            )
    depth = max(len(b.shape) for b in program.buffers.values())
    rates = {}
    for d in range(depth):
        rate: dict[str, Fraction] = {}
        holders = [n for n in program.buffers if d in axes[n]]
        for start in holders:
            if start in rate:
                continue
            rate[start] = Fraction(1)
            frontier = [start]
            while frontier:
                here = frontier.pop()
                for p, dim, c, _, slope in relations:
                    if axes[p][dim] != d or here not in (p, c):
                        continue
                    other, value = (c, rate[p] * slope) if here == p else (p, rate[c] / slope)
                    if other not in rate:
                        rate[other] = value
                        frontier.append(other)
                    elif rate[other] != value:
                        raise ProgramError(f"rates of {p} and {c} do not balance in dimension {d}")
        scale = math.lcm(*(r.denominator for r in rate.values()))
        whole = {n: int(r * scale) for n, r in rate.items()}
        common = math.gcd(*whole.values())
        for n, r in whole.items():
            rates[n, d] = r // common
    unit, strides = 1, {n: [0] * len(b.shape) for n, b in program.buffers.items()}
    for d in reversed(range(depth)):
        there = {n: axes[n].index(d) for n in program.buffers if d in axes[n]}
        for n, at in there.items():
            strides[n][at] = unit * rates[n, d]
        unit = max(strides[n][at] * program.buffers[n].shape[at] for n, at in there.items())
        unit += pad if d == depth - 1 else 0
    return {n: tuple(s) for n, s in strides.items()}


def loops(statement: Statement, fetch: int) -> tuple[int, ...]:
    """Extents in time: a reduction runs through whole wide words, so that its innermost image loop is rounded up to
    `fetch`; iterations beyond the statement's own extent do nothing. What turns a buffer has those loops rounded up
    that go along the rows of what it reads."""
    if not statement.rank or (len(statement.loops) == statement.rank and not turns(statement)):
        return statement.extents
    if len(statement.loops) == statement.rank:
        along = {n for read in statement.reads for n in read.indices[-1].names()}
        return tuple(
            -(-e // fetch) * fetch if n in along else e for n, e in zip(statement.loops, statement.extents, strict=True)
        )
    # The innermost as written, also where the loops are in another order: rows are the wide words of memory.
    inner = max(range(statement.rank), key=lambda k: int(statement.loops[k][1:]))
    rounded = -(-statement.extents[inner] // fetch) * fetch
    return (*statement.extents[:inner], rounded, *statement.extents[inner + 1 :])


def has_outer(program: Program) -> bool:
    """Whether the first loop is the same in all stages: images, say, that go through two or more stages one by one.

    Every stage has it, and every read either passes its index on as the first one, or is of an input and uses none of
    it, as weights do.
    """
    if len(program.statements) < 2 or not is_coarse(program):
        return False
    first = program.statements[0]
    count = first.extents[0] if first.rank and first.loops else 1
    carried = {s.name for s in program.statements}
    for s in program.statements:
        if not s.rank or s.extents[0] != count:
            return False
        for read in s.reads:
            used = [d for d, i in enumerate(read.indices) if s.loops[0] in i.names()]
            passed = used == [0] and str(read.indices[0]) == s.loops[0]
            if not (passed or (not used and read.buffer not in carried)):
                return False
    return count > 1


def coarse(
    program: Program, pad: int = 0, fetch: int = 1, paced: bool = False, overlap: bool = False
) -> dict[str, tuple[int, ...]]:
    """Strides in cycles of the loops of each input and statement; rows of inputs are `pad` cycles longer.

    fetch: words of a wide word, see `loops`. paced: images come at the pace of the reduction that reads them, so that
    few of their rows wait in memory, not at a word a cycle. overlap: all stages begin an iteration of the loop that
    they share (`has_outer`) at the pace of the longest stage, so that each works on another one.
    """
    rows = {n: program.buffers[n].shape[-1] for n in program.inputs}
    for s in program.statements:
        if len(s.loops) == s.rank and not turns(s):
            # A copy with words beyond the borders has longer rows: the image comes at their pace.
            for read in s.reads:
                if read.buffer in rows and read.indices[-1].slope(s.loops[-1]) == 1:
                    rows[read.buffer] = max(rows[read.buffer], s.extents[-1])
    strides: dict[str, tuple[int, ...]] = {
        n: raster((*shape[:-1], rows[n] + pad) if len(shape) > 1 else shape)
        for n, shape in ((n, program.buffers[n].shape) for n in program.inputs)
    }
    for s in program.statements:
        if len(s.loops) > s.rank or turns(s):
            strides[s.name] = raster(loops(s, fetch))
            continue
        pace = [1] * s.rank
        for p, d, c, e, slope in _relations(program):
            if c == s.name:
                # The slowest of what it reads, in whole cycles; what is read backwards takes as long.
                pace[e] = max(pace[e], math.ceil(abs(strides[p][d] * slope)))
        strides[s.name] = _apart(pace, s.extents)
    strides = strides | _paced(program, strides, overlap) if paced else strides
    return strides | _overlapped(program, strides) if overlap else strides


def _apart(pace, extents) -> tuple[int, ...]:
    """A pace whose outer loops are slowed until an iteration begins when all inner ones are over: rows that are read
    more often than they are long take longer than what they read."""
    for d in reversed(range(len(pace) - 1)):
        pace[d] = max(pace[d], pace[d + 1] * extents[d + 1])
    return tuple(pace)


def check(program: Program, strides: dict[str, tuple[int, ...]]) -> None:
    """Raise `ProgramError` where two iterations of a statement, or two words of an input, share a cycle."""
    extents = {n: program.buffers[n].shape for n in program.inputs} | {s.name: s.extents for s in program.statements}
    for name, counts in extents.items():
        behind = 1
        for stride, count in zip(strides[name][::-1], counts[::-1], strict=True):
            if count > 1 and stride < behind:
                raise ProgramError(
                    f"{name}: two iterations share a cycle: a loop advances every {stride} cycles, and its inner loops "
                    f"take {behind}"
                )
            behind = max(behind, stride * count)


def _overlapped(program, strides):
    """Strides of what has the outer loop, all of them with the longest one's stride for it."""
    shared = {s.name for s in program.statements}
    for s in program.statements:
        shared |= {r.buffer for r in s.reads if r.indices and s.loops[0] in r.indices[0].names()}
    longest = max(strides[n][0] for n in shared)
    return {n: (longest, *strides[n][1:]) for n in shared}


def _paced(program, strides, overlap):
    """Strides of images that a reduction reads row by row: a row takes as long as the rows that need it."""
    outer = int(overlap)
    rows: dict[str, set[Fraction]] = {}
    for s in program.statements:
        if len(s.loops) == s.rank:
            continue
        for read in s.reads:
            if len(read.indices) == outer + 2:
                steps = zip(s.loops[outer : s.rank], strides[s.name][outer:], strict=False)
                rows.setdefault(read.buffer, set()).update(
                    cycles / slope for n, cycles in steps if (slope := read.indices[outer].slope(n)) > 0
                )
    found = {}
    for n, paces in rows.items():
        if n in program.inputs and len(paces) == 1 and next(iter(paces)).denominator == 1:
            row = int(next(iter(paces)))
            if overlap:
                # All rows of an image come within the time of the longest stage.
                row = min(
                    row, max(strides[s.name][0] for s in program.statements) // program.buffers[n].shape[1] // 3 * 3
                )
            word = row // program.buffers[n].shape[-1]
            # Reads of three words a turn leave every third cycle of the memory's port: writes keep to it.
            word = word // 3 * 3 or word
            if word:
                found[n] = (*strides[n][:outer], row, word)
    return found
