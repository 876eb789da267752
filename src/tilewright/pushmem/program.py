"""The lowered program: buffers, statements and accesses, as plain records."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.pushmem import dsl
from tilewright.pushmem.dsl import Index
from tilewright.pushmem.errors import ProgramError


@dataclass(frozen=True)
class Access:
    """A word of a buffer: its indices in the loop variables of a statement."""

    buffer: str
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class Statement:
    """One expression in a box of loops.

    loops: names of the loop variables, outermost first; the last ``len(loops) - rank`` are reduced. extents: of the
    loops. expression: nested tuples over ``("read", k)``, ``("const", v)``, ``("index", Index)``, ``("lut", table, a)``
    and ``(operation, signed, *args)``. signed: whether the reduction takes its words as signed numbers.
    """

    name: str
    loops: tuple[str, ...]
    extents: tuple[int, ...]
    rank: int
    reads: tuple[Access, ...]
    expression: Any
    reduction: str = ""
    signed: bool = False


@dataclass(frozen=True)
class Buffer:
    """The words of an input or a stage."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """A program whose unrolled dimensions are separate buffers and statements.

    origins: for each buffer the source's name and its place in the unrolled dimensions. Statements stand after those
    whose words they read. orders: what stages ask of the order of their loops. axes: of a transposed buffer, the
    dimension of its source for each of its own; see `orders`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buffers: dict[str, Buffer]
    statements: tuple[Statement, ...]
    origins: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = field(default_factory=dict)
    orders: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def statement(self, name: str) -> Statement:
        """The statement that writes buffer `name`."""
        return next(s for s in self.statements if s.name == name)

    def as_written(self, name: str, words: np.ndarray) -> np.ndarray:
        """The array of buffer `name` with its dimensions as the stage names them."""
        return words.transpose(np.argsort(self.axes[name])) if name in self.axes else words


def buffer_name(source: dsl.Source, lane: dict[int, int]) -> str:
    """The name of the copy of `source` that `lane` tells."""
    return "_".join([source.name, *(str(v) for _, v in sorted(lane.items()))])


def lower(outputs: dsl.Outputs) -> Program:
    """The program of the stages `outputs`. Raises `ProgramError`, also for a read that no write covers."""
    outputs = dsl.stages(outputs)
    sources = dsl.stages_of(outputs)
    buffers, statements, origins, inputs = {}, [], {}, []
    for source in sources:
        for lane in dsl.lanes(source):
            name = buffer_name(source, lane)
            if name in buffers:
                raise ProgramError(f"two copies of inputs or stages are called {name!r}; expected another name")
            # Where all dimensions are in space, a copy is one word, in a dimension of its own.
            shape = tuple(e for d, e in enumerate(source.shape) if d not in lane) or (1,)
            buffers[name] = Buffer(shape, source.dtype)
            origins[name] = (source.name, tuple(sorted(lane.items())))
            if isinstance(source, dsl.Stage):
                statements.append(_statement(source, lane, name))
            else:
                inputs.append(name)
    used = {r.buffer for s in statements for r in s.reads}
    names = tuple(buffer_name(o, lane) for o in outputs for lane in dsl.lanes(o))
    for name in buffers:
        if name not in used and name not in names:
            raise ProgramError(f"{name}: no stage reads it, and it is no output")
    orders = {s.name: s.order for s in sources if isinstance(s, dsl.Stage) and s.order is not None}
    for s in statements:
        _check_ranges(s, buffers)
    return Program(tuple(inputs), names, buffers, tuple(statements), origins, orders)


def _check_ranges(s: Statement, buffers: dict[str, Buffer]) -> None:
    """Raise `ProgramError` for a read outside the box of a buffer; the message names stage, index and range."""
    grid = dict(zip(s.loops, np.indices(s.extents, sparse=True), strict=True))
    for read in s.reads:
        for i, extent in zip(read.indices, buffers[read.buffer].shape, strict=True):
            places = np.asarray(i.evaluate(grid))
            low, high = int(places.min()), int(places.max())
            if low < 0 or high >= extent:
                raise ProgramError(
                    f"{s.name}: index {i} of {read.buffer} spans {low}..{high}, not within 0..{extent - 1}"
                )


def _statement(stage: dsl.Stage, lane: dict[int, int], name: str) -> Statement:
    e = stage.traced(*dsl.variables(stage, lane))
    loops = [f"i{d}" for d in range(len(stage.shape)) if d not in lane]
    extents = [e_ for d, e_ in enumerate(stage.shape) if d not in lane]
    if not loops:
        loops, extents = ["i0"], [1]
    rank, reduction = len(loops), ""
    if isinstance(e, dsl.Reduce):
        reduction = e.op
        space = [range(e.extents[d]) if d in e.unroll else [Index("var", (f"r{d}",))] for d in range(len(e.extents))]
        terms = [e.traced(*place) for place in itertools.product(*space)]
        for d, extent in enumerate(e.extents):
            if d not in e.unroll:
                loops.append(f"r{d}")
                extents.append(extent)
        e = terms[0]
        for term in terms[1:]:
            e = dsl.Op(reduction, (e, term), term.signed)
    reads: list[Access] = []
    expression = _expression(e, reads, stage.name)
    return Statement(name, tuple(loops), tuple(extents), rank, tuple(reads), expression, reduction, e.signed)


def _expression(e: dsl.Expression, reads: list[Access], stage: str) -> Any:
    match e:
        case dsl.Const():
            return ("const", e.value)
        case dsl.Coordinate():
            return ("index", e.index)
        case dsl.Lut():
            return ("lut", e.table, _expression(e.args[0], reads, stage))
        case dsl.Read():
            lane = {}
            for d in e.source.unroll:
                if e.indices[d].names():
                    raise ProgramError(f"{stage}: {e} has to name one copy of unrolled dimension {d} by a constant")
                lane[d] = e.indices[d].evaluate({})
                if not 0 <= lane[d] < e.source.shape[d]:
                    raise ProgramError(f"{stage}: {e} reads outside 0..{e.source.shape[d] - 1} in dimension {d}")
            kept = tuple(i for d, i in enumerate(e.indices) if d not in lane) or (dsl.index(0),)
            access = Access(buffer_name(e.source, lane), kept)
            if access not in reads:
                reads.append(access)
            return ("read", reads.index(access))
        case dsl.Op():
            return (e.name, e.signed, *(_expression(a, reads, stage) for a in e.args))
    raise ProgramError(f"{stage}: a reduction has to be the whole expression of its stage")
