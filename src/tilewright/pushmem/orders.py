"""Orders of a stage's loops: which are legal, the one that a stage names, and those that ``auto`` tries.

A PE keeps one sum at a time, so that reduced loops stand inside all others. Any order within the two groups is legal:
words wrap around, so that sums, minima and maxima are the same in every order, and no stage reads itself. Another order
of the outer loops transposes the stage's buffer; stages that follow its pace are transposed with it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.program import Access, Program, Statement

AUTO = "auto"
# ASSUME: orders beyond this many, those of the least cycles first, are not compiled. The apps have four.
MOST = 8


def legal(statement: Statement) -> Iterator[tuple[str, ...]]:
    """The orders of a reduction's loops, outermost first, the written one first."""
    outer, inner = statement.loops[: statement.rank], statement.loops[statement.rank :]
    for one, other in itertools.product(itertools.permutations(outer), itertools.permutations(inner)):
        yield (*one, *other)


def check(statement: Statement, order: str | Sequence[str]) -> None:
    """Raise `ProgramError` unless `order` is `AUTO` or a legal order of the loops of `statement`."""
    name, known = statement.name, ", ".join(statement.loops)
    if order == AUTO:
        return
    if not isinstance(order, tuple | list) or sorted(order) != sorted(statement.loops):
        raise ProgramError(f"{name}: unknown order {order!r}; known: {AUTO!r}, or each of {known} once")
    order, outer = tuple(order), statement.loops[: statement.rank]
    if len(statement.loops) == statement.rank:
        if order != statement.loops:
            raise ProgramError(
                f"{name}: a stage without a reduction in time takes the order of its sources; found {order!r}"
            )
        return
    for n in order[: statement.rank]:
        if n not in outer:
            late = next(o for o in order[order.index(n) :] if o in outer)
            raise ProgramError(
                f"{name}: order {', '.join(order)} breaks a dependence: {n} adds to one sum, and {late} within it "
                "begins another; a PE keeps one sum at a time"
            )


def choices(program: Program) -> list[dict[str, tuple[str, ...]]]:
    """The orders by stage that a program may take, the written ones first. Raises `ProgramError` for a bad order."""
    asked: dict[str, list[tuple[str, ...]]] = {}
    reducing = {program.origins[s.name][0] for s in program.statements if len(s.loops) > s.rank}
    for s in program.statements:
        stage = program.origins[s.name][0]
        wish = program.orders.get(stage)
        # What follows a reduction within its stage takes the order of that.
        if wish is None or (stage in reducing and len(s.loops) == s.rank):
            continue
        check(s, wish)
        if len(s.loops) > s.rank:
            asked[stage] = list(legal(s)) if wish == AUTO else [tuple(wish)]
    return [dict(zip(asked, each, strict=True)) for each in itertools.product(*asked.values())]


def reordered(program: Program, orders: dict[str, tuple[str, ...]]) -> Program:
    """`program` with the loops of its stages in `orders`; `Program.axes` says which buffers are transposed."""
    axes: dict[str, tuple[int, ...]] = {}
    statements, buffers = [], dict(program.buffers)
    for s in program.statements:
        reads = tuple(_transposed(r, axes.get(r.buffer)) for r in s.reads)
        order = orders.get(program.origins[s.name][0]) or _following(s, reads, axes)
        extents = dict(zip(s.loops, s.extents, strict=True))
        if order[: s.rank] != s.loops[: s.rank]:
            axes[s.name] = tuple(s.loops.index(n) for n in order[: s.rank])
            shape = buffers[s.name].shape
            buffers[s.name] = replace(buffers[s.name], shape=tuple(shape[d] for d in axes[s.name]))
        statements.append(replace(s, loops=order, extents=tuple(extents[n] for n in order), reads=reads))
    return replace(program, statements=tuple(statements), buffers=buffers, axes=axes)


def _transposed(read: Access, axes) -> Access:
    return read if axes is None else replace(read, indices=tuple(read.indices[d] for d in axes))


def _following(statement, reads, axes) -> tuple[str, ...]:
    """The loops of a stage that names no order: as it reads a transposed buffer, else as they are written."""
    if len(statement.loops) > statement.rank:
        return statement.loops
    found = [n for r in reads if r.buffer in axes for i in r.indices for n in sorted(i.names())]
    return tuple(dict.fromkeys([*found, *statement.loops]))
