"""Start cycles of all statements: a linear program of differences that keeps the fewest words alive.

With the strides of `rates`, iteration i of s runs at ``strides·i + start``. A read of p by c is legal if the word is
there: ``start_c - start_p >= gap``. The matrix is totally unimodular, so HiGHS answers in whole numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.pushmem.errors import ProgramError, need
from tilewright.pushmem.extract import pairs
from tilewright.pushmem.program import Access, Program, Statement


@dataclass(frozen=True)
class Edge:
    """A read. low, high: the least and largest cycles from the write to the read, both starting at 0."""

    statement: str
    read: int
    buffer: str
    low: int
    high: int


@dataclass(frozen=True)
class Schedule:
    """Strides of the loops and start cycle of every input and statement."""

    policy: str
    strides: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    edges: tuple[Edge, ...]
    storage: int
    storage_asap: int
    last_cycle: int

    def distance(self, edge: Edge) -> tuple[int, int]:
        """Least and largest cycles from write to read."""
        shift = self.starts[edge.statement] - self.starts[edge.buffer]
        return edge.low + shift, edge.high + shift

    def times(self, name: str, extents: Sequence[int]) -> np.ndarray:
        """int64, of the shape `extents`: the cycle of each iteration of a statement, or of each word of an input."""
        grid = np.indices(extents, dtype=np.int64, sparse=True)
        steps = sum((g * k for g, k in zip(grid, self.strides[name], strict=True)), np.zeros(extents, np.int64))
        return steps + self.starts[name]

    def map(self, statement: Statement) -> str:
        """The schedule of `statement` as an isl map."""
        terms = [f"{k}*{n}" for k, n in zip(self.strides[statement.name], statement.loops, strict=True)]
        time = " + ".join([*terms, str(self.starts[statement.name])])
        return f"{{ {statement.name}[{', '.join(statement.loops)}] -> [{time}] }}"


def written(program: Program, strides: dict[str, tuple[int, ...]], name: str) -> tuple[tuple[int, ...], int]:
    """``(strides, offset)``: word a of buffer `name` is there at ``strides·a + offset`` after its statement starts."""
    for s in program.statements:
        if s.name == name:
            tail = sum(k * (e - 1) for k, e in zip(strides[name][s.rank :], s.extents[s.rank :], strict=True))
            return strides[name][: s.rank], tail
    return strides[name], 0


def gaps(program: Program, strides: dict[str, tuple[int, ...]]) -> list[Edge]:
    """The edge of every read, by isl."""
    isl = need("islpy")
    found: dict[tuple, tuple[int, int]] = {}
    edges = []
    for s, k, read in pairs(program):
        key = (s.loops, s.extents, strides[s.name], read.indices, written(program, strides, read.buffer))
        if key not in found:
            found[key] = _span(isl, s, read, strides[s.name], *written(program, strides, read.buffer))
        edges.append(Edge(s.name, k, read.buffer, *found[key]))
    return edges


def _span(isl, s: Statement, read: Access, own, theirs, offset) -> tuple[int, int]:
    time = [f"{k}*{n}" for k, n in zip(own, s.loops, strict=True)]
    word = [f"{k}*({i})" for k, i in zip(theirs, read.indices, strict=True)]
    bounds = [f"0 <= {n} < {e}" for n, e in zip(s.loops, s.extents, strict=True)]
    difference = f"t = {' + '.join(time or ['0'])} - ({' + '.join([*word, str(offset)])})"
    text = f"{{ [t] : exists {', '.join(s.loops)} : {' and '.join([*bounds, difference])} }}"
    times = isl.Set(text)
    return int(str(times.dim_min(0).min_val())), int(str(times.dim_max(0).max_val()))


def schedule(program: Program, strides, policy: str, slack: dict[str, int], whole=None) -> Schedule:
    """The start cycles that keep the fewest words alive. slack: least cycles from write to read of a buffer whose
    distances vary, as the memory needs them. whole: of buffers whose distances vary, least cycles from the start of the
    writes to that of a read, whatever it reads. Raises `ProgramError` where HiGHS finds no answer.
    """
    from scipy.optimize import linprog

    edges = gaps(program, strides)
    names = [*program.inputs, *(s.name for s in program.statements)]
    column = {n: j for j, n in enumerate(names)}
    buffers = sorted({e.buffer for e in edges})
    alive = {n: len(names) + j for j, n in enumerate(buffers)}
    rows, bounds = [], []
    least = {}
    for e in edges:
        need_ = (0 if e.low == e.high else slack.get(e.buffer, 0)) - e.low
        if whole is not None and e.low != e.high:
            need_ = max(need_, whole[e.buffer])
        least[e] = need_
        row = np.zeros(len(names) + len(buffers))
        row[column[e.statement]] -= 1
        row[column[e.buffer]] += 1
        rows.append(row)
        bounds.append(-need_)
        row = np.zeros(len(names) + len(buffers))
        row[column[e.statement]] += 1
        row[column[e.buffer]] -= 1
        row[alive[e.buffer]] = -1
        rows.append(row)
        bounds.append(-e.high)
    # Starts break ties only: their weight is less than that of one cycle of one buffer.
    cost = np.concatenate([np.full(len(names), 1e-4 / max(1, len(names))), np.ones(len(buffers))])
    answer = linprog(
        cost, A_ub=np.reshape(rows, (-1, len(cost))), b_ub=np.array(bounds), bounds=(0, None), method="highs"
    )
    if answer.status:
        raise ProgramError(f"the schedule has no solution: {answer.message}")
    starts = {n: round(answer.x[column[n]]) for n in names}
    asap = {n: 0 for n in names}
    for s in program.statements:
        asap[s.name] = max([0, *(asap[e.buffer] + least[e] for e in edges if e.statement == s.name)])
    last = 0
    for name in program.outputs:
        s = next(s for s in program.statements if s.name == name)
        own, offset = written(program, strides, name)
        last = max(last, starts[name] + offset + sum(k * (e - 1) for k, e in zip(own, s.extents, strict=False)))
    return Schedule(policy, strides, starts, tuple(edges), storage(edges, starts), storage(edges, asap), last)


def storage(edges: list[Edge], starts: dict[str, int]) -> int:
    """Words alive: of each buffer the largest cycles from write to read, summed."""
    return sum(
        max(e.high + starts[e.statement] - starts[e.buffer] for e in edges if e.buffer == b)
        for b in {e.buffer for e in edges}
    )
