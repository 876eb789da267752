"""From a program as it is written to the operations of PEs: copies in space, reads beyond borders, exact division.

A read whose index folds at a border becomes a `select` among reads at plain indices. A division by a constant becomes a
multiplication by its reciprocal. What one PE cannot do within its stage, such as a sum over time that more operations
follow, gets a statement of its own.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.pushmem import dsl, expressions, reference
from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.expressions import BITS, WORD, Const, Coordinate, Index, Op, Read
from tilewright.pushmem.program import Access, Buffer, Program, Statement

# ASSUME: an index that folds in more places than this is meant to turn a whole image.
_PLACES = 32
# Rows or columns at a border that read one place of it.
_FEW = 4


def lower(outputs: dsl.Outputs) -> Program:
    """The program of the stages `outputs`. Raises `ProgramError`, also for a read that no write covers."""
    outputs = dsl.stages(outputs)
    sources = dsl.stages_of(outputs)
    buffers: dict[str, Buffer] = {}
    statements: list[Statement] = []
    origins, inputs = {}, []

    def known(name, shape, dtype, source, lane=()):
        if name in buffers:
            raise ProgramError(f"two copies of inputs or stages are called {name!r}; expected another name")
        buffers[name], origins[name] = Buffer(shape, dtype), (source, tuple(sorted(dict(lane).items())))

    padded = _Padded()
    for source in sources:
        for lane in dsl.lanes(source):
            name = buffer_name(source, lane)
            # Where all dimensions are in space, a copy is one word, in a dimension of its own.
            shape = tuple(e for d, e in enumerate(source.shape) if d not in lane) or (1,)
            if not isinstance(source, dsl.Stage):
                known(name, shape, source.dtype, source.name, lane)
                inputs.append(name)
                continue
            made = _Copy(source, lane, name, padded).statements()
            for s, dtype in padded.new():
                known(s.name, s.extents, dtype, s.name)
                statements.append(s)
            for s in made:
                known(s.name, shape, source.dtype if s.name == name else "uint16", source.name, lane)
                _check_ranges(s, buffers, source)
                statements.append(s)
    used = {r.buffer for s in statements for r in s.reads}
    names = tuple(buffer_name(o, lane) for o in outputs for lane in dsl.lanes(o))
    for name in buffers:
        if name not in used and name not in names:
            raise ProgramError(f"{name}: no stage reads it, and it is no output")
    orders = {s.name: s.order for s in sources if isinstance(s, dsl.Stage) and s.order is not None}
    return Program(tuple(inputs), names, buffers, tuple(statements), origins, orders)


def buffer_name(source: dsl.Source, lane: dict[int, int]) -> str:
    """The name of the copy of `source` that `lane` tells."""
    return "_".join([source.name, *(str(v) for _, v in sorted(lane.items()))])


def _check_ranges(s: Statement, buffers: dict[str, Buffer], stage: dsl.Stage) -> None:
    """Raise `ProgramError` for a read outside the box of a buffer; the message names stage, index and range."""
    for k, read in enumerate(s.reads):
        for i, extent in zip(read.indices, buffers[read.buffer].shape, strict=True):
            places = s.asked(k, i.evaluate(s.grid))
            low, high = int(places.min()), int(places.max())
            if low < 0 or high >= extent:
                found = f"{s.name}: index {i} of {read.buffer} spans {low}..{high}, not within 0..{extent - 1}"
                found = expressions.as_written(stage.make, dsl.variables(stage, {}), found)
                raise ProgramError(f"{found}; bounded() says what stands beyond")


class _Padded:
    """Copies of buffers with words beyond their borders, for sums over time: rows then begin with a wide word."""

    def __init__(self) -> None:
        self.known: dict[Any, str] = {}
        self.made: list[tuple[Statement, str]] = []

    def new(self) -> list[tuple[Statement, str]]:
        """Statements, with the type of their words, that were not told before."""
        self.made, told = [], self.made
        return told

    def access(self, e: Read, lane: dict[int, int], others: list[Read], grid: dict[str, np.ndarray]) -> Access:
        """The word of `e` in a copy that has all words that `e` and `others` ask for."""
        name, indices = buffer_name(e.source, lane), [i for d, i in enumerate(e.indices) if d not in lane]
        alike = [e, *(o for o in others if (o.source, o.border) == (e.source, e.border))]
        places = [
            [np.asarray(o.indices[d].evaluate(grid)) for o in alike] for d in range(len(e.indices)) if d not in lane
        ]
        low, high = (
            [min(int(p.min()) for p in each) for each in places],
            [max(int(p.max()) for p in each) for each in places],
        )
        key = name, e.border, *low, *high
        if key not in self.known:
            self.known[key] = f"{name}__{e.border}{len(self.known)}"
            shape = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
            at = iter(Index("var", (f"i{d}",)) + a for d, a in enumerate(low))
            read = Read(e.source, tuple(i if d in lane else next(at) for d, i in enumerate(e.indices)), e.border)
            stage = dsl.Stage(self.known[key], shape, lambda *_: read)
            self.made.append((_Copy(stage, {}, stage.name, self).statements()[0], e.source.dtype))
        return Access(self.known[key], tuple(i - a for i, a in zip(indices, low, strict=True)))


class _Copy:
    """One copy of a stage, and the statements that compute it."""

    def __init__(self, stage: dsl.Stage, lane: dict[int, int], name: str, padded: _Padded):
        self.stage, self.lane, self.name, self.padded = stage, lane, name, padded
        self.loops = [f"i{d}" for d in range(len(stage.shape)) if d not in lane] or ["i0"]
        self.extents = [e for d, e in enumerate(stage.shape) if d not in lane] or [1]
        self.helpers: list[Statement] = []
        self.number = itertools.count()

    def statements(self) -> list[Statement]:
        """In the order of what they read of each other; the last one is the copy."""
        e = self.stage.traced(*dsl.variables(self.stage, self.lane))
        if self.stage.dtype == "uint8" and not _fits(e, 255):
            e = e & 255
        whole = self.statement(e, self.name)
        return [*self.helpers, whole]

    def statement(self, e: expressions.Expression, name: str) -> Statement:
        """One that computes `e`, which may be a reduction over time."""
        loops, extents, reduction = list(self.loops), list(self.extents), ""
        if isinstance(e, dsl.Reduce):
            reduction = e.op
            for d, extent in enumerate(e.extents):
                if d not in e.unroll:
                    loops.append(f"r{d}")
                    extents.append(extent)
            e = _in_space(e)
        body = _Body(self, loops, extents, e)
        expression = body.lowered(e)
        rank = len(self.loops)
        return Statement(name, tuple(loops), tuple(extents), rank, tuple(body.reads), expression, reduction, e.signed)

    def helper(self, e: expressions.Expression) -> Access:
        """What `e` gives, computed by a statement of its own."""
        made = self.statement(e, f"{self.name}__{next(self.number)}")
        self.helpers.append(made)
        return Access(made.name, tuple(Index("var", (n,)) for n in self.loops))


def _reads(e: expressions.Expression) -> Iterator[Read]:
    """The reads in `e` that are not in a reduction."""
    if isinstance(e, Read):
        yield e
    elif not isinstance(e, dsl.Reduce):
        for a in getattr(e, "args", ()):
            yield from _reads(a)


def _in_space(e: dsl.Reduce) -> expressions.Expression:
    """The body of a reduction, with what is reduced in space put together."""
    space = [range(e.extents[d]) if d in e.unroll else [Index("var", (f"r{d}",))] for d in range(len(e.extents))]
    first, *others = [e.traced(*place) for place in itertools.product(*space)]
    for term in others:
        first = Op(e.op, (first, term), term.signed)
    return first


class _Body:
    """The expression of one statement in the loops `loops`, and its reads."""

    def __init__(self, copy: _Copy, loops: list[str], extents: list[int], e: expressions.Expression):
        self.copy, self.all = copy, list(_reads(e))
        self.reads: list[Access] = []
        self.grid = dict(zip(loops, np.indices(extents, sparse=True), strict=True))
        # The iterations that the expression at hand is for.
        self.asked: Any = np.True_
        self.within_sum = len(loops) > len(copy.loops)

    def lowered(self, e: expressions.Expression) -> Any:
        """As `Statement.expression` says."""
        match e:
            case Const():
                return ("const", e.value)
            case Coordinate():
                return ("index", e.index)
            case dsl.Lut():
                return ("lut", e.table, self.lowered(e.args[0]))
            case Read():
                return self.read(e)
            case dsl.Reduce() if len(e.unroll) == len(e.extents):
                return self.lowered(_in_space(e))
            case dsl.Reduce() if not self.within_sum:
                return self.access(self.copy.helper(e))
            case Op(name="select") if expressions.of_indices(e.args[0]):
                return self.selected(
                    e.args[0], lambda: self.lowered(e.args[1]), lambda: self.lowered(e.args[2]), e.signed
                )
            case Op(name="//" | "%"):
                return self.divided(e)
            case Op():
                return (e.name, e.signed, *map(self.lowered, e.args))
        raise ProgramError(f"{self.copy.stage.name}: {e} stands within another reduction; expected it in another stage")

    def access(self, access: Access) -> Any:
        if access not in self.reads:
            self.reads.append(access)
        return ("read", self.reads.index(access))

    def selected(self, condition: expressions.Expression, yes, no, signed=False) -> Any:
        """A choice by indices; the condition stays only where it is not the same in all iterations that get here."""
        chosen, before = reference.words(condition, self.grid, {}) != 0, self.asked
        sides = []
        for side, make in ((chosen, yes), (~chosen, no)):
            self.asked = before & side
            sides.append(make() if self.asked.any() else None)
        self.asked = before
        if None in sides:
            return sides[0] or sides[1]
        return ("select", signed, self.lowered(condition), *sides)

    def read(self, e: Read) -> Any:
        """A read, or the choice among several where an index folds at a border."""
        lane = {d: e.indices[d] for d in e.source.unroll}
        if e.border == "zero":
            places = zip(e.indices, e.source.shape, strict=True)
            inside = [Op("<", (Coordinate(i), expressions.as_expression(n)), False) for i, n in places]
        # Of a distance that varies, memory is asked by address; rows of a copy that begin with a wide word fit it.
        varies = self.within_sum or any(p.kind in ("floordiv", "mod") for i in e.indices for p in _parts(i))
        if varies and e.border and self.beyond(e) and not any(i.names() for i in lane.values()):
            known = {d: int(i.evaluate({})) for d, i in lane.items()}
            return self.access(self.copy.padded.access(e, known, self.all, self.grid))
        if e.border == "zero":
            return self.within(inside, lambda: self.read(Read(e.source, e.indices)))
        indices = e.indices
        if e.border:
            indices = tuple(Index(e.border, (i, n)) for i, n in zip(indices, e.source.shape, strict=True))
        ways = [self.ways(d, i) for d, i in enumerate(indices)]
        if math.prod(map(len, ways)) > _PLACES:
            text = expressions.as_written(self.copy.stage.make, dsl.variables(self.copy.stage, {}), str(e))
            raise ProgramError(
                f"{self.copy.stage.name}: {text} reads {math.prod(map(len, ways))} places beyond the border, expected "
                f"at most {_PLACES}; a stage that copies the whole image with its border would help"
            )

        def chosen(d: int, places: tuple[Index, ...]) -> Any:
            return self.plain(e, places) if d == len(ways) else among(d, places, len(ways[d]) - 1)

        def among(d: int, places: tuple[Index, ...], last: int) -> Any:
            place, condition = ways[d][last]
            if condition is None:
                return chosen(d + 1, (*places, place))
            here = lambda: chosen(d + 1, (*places, place))  # noqa: E731
            return self.selected(condition, here, lambda: among(d, places, last - 1), e.signed)

        return chosen(0, ())

    def ways(self, d: int, i: Index) -> list[tuple[Index, Any]]:
        """`_ways` of the index of dimension `d`. Where a few iterations of that loop read one place, such as the last
        row at a border, it is at a constant distance from each."""
        loop = self.grid.get(f"i{d}")
        if i.kind != "const" or loop is None or self.asked.all():
            return _ways(i, self.grid)
        shape = np.broadcast_shapes(self.asked.shape, loop.shape)
        values = np.unique(np.broadcast_to(loop, shape)[np.broadcast_to(self.asked, shape)])
        if not 1 < len(values) <= _FEW:
            return [(i, None)]
        return by_places(Index("var", (f"i{d}",)), values, np.full(len(values), i.args[0]))

    def beyond(self, e: Read) -> bool:
        """Whether a read goes beyond the borders of its source."""
        places = [np.asarray(i.evaluate(self.grid)) for i in e.indices]
        return any(p.min() < 0 or p.max() >= n for p, n in zip(places, e.source.shape, strict=True))

    def within(self, conditions: list[Op], word: Any) -> Any:
        """A word where all conditions on indices hold, else 0."""
        if not conditions:
            return word()
        return self.selected(conditions[0], lambda: self.within(conditions[1:], word), lambda: ("const", 0))

    def plain(self, e: Read, indices: tuple[Index, ...]) -> Any:
        stage, lane = self.copy.stage.name, {}
        for d in e.source.unroll:
            if indices[d].names():
                raise ProgramError(f"{stage}: {e} has to name one copy of unrolled dimension {d} by a constant")
            lane[d] = int(indices[d].evaluate({}))
            if not 0 <= lane[d] < e.source.shape[d]:
                raise ProgramError(f"{stage}: {e} reads outside 0..{e.source.shape[d] - 1} in dimension {d}")
        kept = tuple(i for d, i in enumerate(indices) if d not in lane) or (expressions.index(0),)
        return self.access(Access(buffer_name(e.source, lane), kept))

    def divided(self, e: Op) -> Any:
        """A quotient or a remainder; the dividend, used several times, is computed once."""
        given, divisor = e.args[0], int(expressions.number(e.args[1].value, e.args[1].signed))  # type: ignore[attr-defined]
        if not divisor & (divisor - 1) and e.name == "//":
            return (">>", e.signed, self.lowered(given), ("const", divisor.bit_length() - 1))
        if not divisor & (divisor - 1):
            return ("&", e.signed, self.lowered(given), ("const", divisor - 1))
        simple = self.within_sum or isinstance(given, Read | Const | Coordinate)
        word = self.lowered(given) if simple else self.access(self.copy.helper(given))
        most = WORD // 2 if e.signed else 255 if _fits(given, 255) else WORD
        # All ones of a negative word, which then divides as its complement does: exactly rounded down.
        sign = (">>", True, word, ("const", BITS - 1))
        whole = _quotient(("^", False, word, sign) if e.signed else word, divisor, most)
        whole = ("^", False, whole, sign) if e.signed else whole
        if e.name == "//":
            return whole
        return ("-", False, word, ("*", False, whole, ("const", divisor)))


def _quotient(word: Any, divisor: int, most: int) -> Any:
    """An unsigned word of at most `most` by a constant, after Granlund and Montgomery (1994)."""

    def shifted(e, bits):
        return (">>", False, e, ("const", bits)) if bits else e

    for bits in range(BITS):
        factor = -(-(1 << BITS + bits) // divisor)
        if factor <= WORD and (factor * divisor - (1 << BITS + bits)) * most < 1 << BITS + bits:
            return shifted(("high", False, word, ("const", factor)), bits)
    bits = divisor.bit_length()
    high = ("high", False, word, ("const", (((1 << bits) - divisor << BITS) // divisor) + 1))
    return shifted(("+", False, high, shifted(("-", False, word, high), 1)), bits - 1)


def _fits(e: expressions.Expression, most: int) -> bool:
    """Whether the number is one of 0 .. `most` for sure."""
    match e:
        case Const():
            return e.value <= most
        case Read():
            return e.source.dtype == "uint8" and most >= 255
        case dsl.Lut():
            return max(e.table) <= most
        case Op(name="select"):
            return _fits(e.args[1], most) and _fits(e.args[2], most)
        case Op(name="&"):
            return any(_fits(a, most) for a in e.args)
        case Op(name="min"):
            return any(_fits(a, most) for a in e.args) and (not e.signed or all(_fits(a, WORD // 2) for a in e.args))
        case Op(name="max"):
            # Of signed words, one that is not negative makes all of them so.
            return all(_fits(a, most) for a in e.args) or (
                e.signed and most >= WORD // 2 and any(_fits(a, WORD // 2) for a in e.args)
            )
        case Op(name="<" | "<=" | "==" | "!="):
            return most >= 1
        case Op(name=">>" | "//"):
            return _fits(e.args[0], most)
    return False


def _ways(i: Index, grid: dict[str, np.ndarray]) -> list[tuple[Index, Any]]:
    """Plain indices that `i` is, each with the condition under which it is; a later one comes before an earlier one,
    and the first is without a condition."""
    if not any(_is_fold(part, grid) for part in _parts(i)):
        return [(i, None)]
    if i.kind == "add":
        one, other = (_ways(a, grid) for a in i.args)
        return [(a + b, _both(c, d)) for (a, c), (b, d) in itertools.product(one, other)]
    if not _is_fold(i, grid):
        return [(Index(i.kind, (a, i.args[1])), c) for a, c in _ways(i.args[0], grid)]
    # A bound of a bound is one function of what is within.
    inner, outer = i, []
    while _is_fold(inner, grid):
        outer.append(inner)
        inner = inner.args[0]
    if len(_ways(inner, grid)) > 1:
        raise ProgramError(f"expected an index that is bounded or folded once, found {i}")
    values = placed = np.unique(inner.evaluate(grid))
    for node in reversed(outer):
        placed = np.asarray(expressions.INDICES[node.kind](placed, node.args[1]))
    return by_places(inner, values, placed)


def by_places(i: Index, values: np.ndarray, placed: np.ndarray) -> list[tuple[Index, Any]]:
    """Sums of `i` and constants that are `placed` where `i` has its sorted `values`, as `_ways` gives them."""
    apart = placed - values
    steps, counts = np.unique(apart, return_counts=True)
    usual = steps[np.argmax(counts)]
    others = [(i + int(step), _among(i, values, apart == step)) for step in steps if step != usual]
    return [(i + int(usual), None), *others]


def _parts(i: Index) -> Iterator[Index]:
    yield i
    for a in i.args:
        if isinstance(a, Index):
            yield from _parts(a)


def _both(one, other):
    return other if one is None else one if other is None else one & other


def _is_fold(i: Index, grid: dict[str, np.ndarray]) -> bool:
    """Whether an index is no box of loops: a border, a bound, or a modulo that begins within one of its few rounds."""
    if i.kind != "mod":
        return i.kind in expressions.FOLDS or i.kind in ("min", "max")
    values = np.asarray(i.args[0].evaluate(grid))
    low, high = int(values.min()), int(values.max())
    return low % i.args[1] != 0 and 0 < high // i.args[1] - low // i.args[1] < 3


def _among(i: Index, values: np.ndarray, chosen: np.ndarray) -> expressions.Expression:
    """Whether an index is one of those of its sorted `values` that are `chosen`."""
    word = Coordinate(i).as_signed()
    found: expressions.Expression | None = None
    for low, high in _stretches(chosen):
        if low == high:
            part = word == int(values[low])
        elif low == 0:
            part = word <= int(values[high])
        elif high == len(values) - 1:
            part = word >= int(values[low])
        else:
            part = (word >= int(values[low])) & (word <= int(values[high]))
        found = part if found is None else found | part
    assert found is not None
    return found


def _stretches(chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last of the places in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(int)))
    yield from ((int(a), int(b) - 1) for a, b in edges.reshape(-1, 2))
