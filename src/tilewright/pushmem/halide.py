"""A second front end: pipelines written in Halide, read from their lowered loop nests.

`outputs` lowers a `halide.Func` whose schedule is ``compute_root`` for each stage, and reads the text of Halide's own
lowered statement: loops, lets, allocations, stores and loads. Each function becomes a stage of `dsl`; an update that
adds to itself over an `RDom` becomes a sum over these loops, `max` and `min` likewise, and functions or sums that were
unrolled are laid out in space. Loops that Halide splits at borders become a choice by indices. Words have 16 bits, and
bytes wrap around as Halide's do. Bounds and strides are those of the shapes that are given.

Halide simplifies and reorders expressions before it lowers them. So operands of sums and products may stand otherwise
than in a program that is written in `dsl`; reads, loops, schedules and words are the same. Needs the package `halide`
(the extra of this name). The syntax is that of Halide 21.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tilewright.pushmem import dsl, expressions, lowering
from tilewright.pushmem.errors import ProgramError, need

# ``(shape, type)`` by name.
Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
TYPES = ("uint16", "int16", "uint8")
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][\w.$]*)|(<=|>=|==|!=|&&|\|\||[-+*/%<>()\[\],!]))")
_FOR = re.compile(r"for \(([\w.$]+), (.+), (\d+)\) \{")
_LET = re.compile(r"let ([\w.$]+) = (.+)")
_ALLOCATE = re.compile(r"allocate ([\w.$]+)\[(\w+)((?: \* \d+)+)\]")
_STORE = re.compile(r"([\w.$]+)\[(.+)\]\s=\s(.+)")
_SKIPPED = re.compile(r"module |external_plus_metadata |free |let [\w.$]+ = \(void \*\)_halide_buffer_get_host")
_IDENTITIES = {("+", t): 0 for t in TYPES} | {("max", "uint16"): 0, ("max", "uint8"): 0, ("min", "uint16"): 65535}
_IDENTITIES |= {("min", "uint8"): 255, ("max", "int16"): -32768, ("min", "int16"): 32767}
_RANGES = {"uint16": range(1 << 16), "uint8": range(1 << 8), "int16": range(-(1 << 15), 1 << 15)}
_LEVELS = (("||",), ("&&",), ("==", "!=", "<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%"))
_BINARY = {
    **{"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "shift_right": ">>", "shift_left": "<<"},
    **{"&&": "&", "||": "|"},
    **{sign: sign for sign in ("min", "max", "+", "-", "*", "<", "<=", "==", "!=")},
}


def outputs(func: Any, inputs: Sequence[tuple[Any, Sequence[int]]], shape: Sequence[int]) -> tuple[dsl.Stage, ...]:
    """The program of a `halide.Func` that is realised over `shape`, outermost dimension first.

    inputs: pairs of a `halide.ImageParam` and its shape, likewise. Bounds and strides of all are set to these shapes,
    dense. Raises `ProgramError` for what no program of `dsl` says.
    """
    given = {_plain(i.name()): (tuple(size), _type(i.name(), i.type())) for i, size in inputs}
    kind, *others = func.types()
    if others:
        raise ProgramError(f"{func.name()}: expected one value a word, found a tuple of {1 + len(others)}")
    made = {_plain(func.name()): (tuple(shape), _type(func.name(), kind))}
    return read(lowered(func, inputs, shape), given, made)


def lowered(func: Any, inputs: Sequence[tuple[Any, Sequence[int]]], shape: Sequence[int]) -> str:
    """The text of the lowered statement of `func` over `shape`; bounds are part of it, and nothing is checked there."""
    halide = need("halide", "halide")
    for param, size in inputs:
        _dense(param, tuple(size))
    _dense(func.output_buffer(), tuple(shape))
    features = halide.TargetFeature
    target = halide.get_host_target()
    for feature in (features.NoAsserts, features.NoBoundsQuery, features.NoRuntime):
        target = target.with_feature(feature)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lowered.stmt"
        func.compile_to_lowered_stmt(str(path), [i for i, _ in inputs], halide.StmtOutputFormat.Text, target)
        return path.read_text()


def read(text: str, inputs: Shapes, made: Shapes) -> tuple[dsl.Stage, ...]:
    """The stages of a lowered statement that are outputs.

    inputs, made: (shape, type) by name of what comes in and goes out. Raises `ProgramError`.
    """
    stores, allocated = _parse(text)
    sources: dict[str, dsl.Source] = {}
    first = {s.name: s for s in reversed(stores)}
    allocated = {n: (_unfolded(n, shape, first), kind) for n, (shape, kind) in allocated.items()}
    known = inputs | allocated | made
    extents = {name: shape for name, (shape, _) in known.items()}
    order = list(dict.fromkeys(s.name for s in stores))
    constant = _constant_dimensions(stores, extents)
    for name, (shape, dtype) in inputs.items():
        sources[name] = dsl.Input(name, shape, dtype, constant.get(name, ()))
    for name in order:
        if name not in extents:
            raise ProgramError(f"{name}: expected an allocated buffer or an output, found neither")
        mine = [s for s in stores if s.name == name]
        sources[name] = _stage(name, *known[name], mine, sources, extents)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
    return tuple(sources[name] for name in order if name in made)  # type: ignore[misc]


def _plain(name):
    """A name without the number that Halide gives the second function or loop of one name."""
    return re.sub(r"\$\d+$", "", name)


def _type(name, kind):
    found = f"{'u' if kind.is_uint() else ''}int{kind.bits()}" if not kind.is_float() else f"float{kind.bits()}"
    return _word_type(_plain(name), found)


def _word_type(name, found):
    if found not in TYPES:
        raise ProgramError(f"{name}: expected words of {' or '.join(TYPES)}, found {found}")
    return found


def _dense(buffer, shape):
    for d, extent in enumerate(reversed(shape)):
        buffer.dim(d).set_bounds(0, extent).set_stride(math.prod(shape[len(shape) - d :]))


@dataclass(frozen=True)
class _Store:
    """``name[index] = value`` within loops, outermost first: (variable, least value, extent)."""

    name: str
    index: Any
    value: Any
    loops: tuple[tuple[str, int, int], ...]
    line: str = field(compare=False, default="")


def _parse(text):
    """``(stores, allocated)``: stores in order; shape and type by name. Lets are put in where they are used."""
    stores, allocated = [], {}
    scopes: list[tuple[str, dict]] = [("", {})]
    loops: list[tuple[str, int, int]] = []
    # What is allocated within loops has a word for each of their iterations.
    within: dict[str, tuple] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or _SKIPPED.match(line):
            if line.endswith("{"):
                scopes.append(("func", {}))
            continue
        if "ramp(" in line:
            raise ProgramError(f"expected one word a store, found vectors in line {number}: {line}")
        known = {name: value for _, scope in scopes for name, value in scope.items()}

        def parsed(part, line=line, known=known):
            return _each(_Reader(part, line, known).whole(), within)

        if line == "}":
            kind, _ = scopes.pop()
            if kind == "for":
                loops.pop()
        elif line.startswith(("produce ", "consume ")) and line.endswith("{"):
            scopes.append(("", {}))
        elif match := _FOR.fullmatch(line):
            least = _affine(parsed(match[2]), line)
            if set(least) - {None}:
                raise ProgramError(f"expected loops that begin at a constant, found line {number}: {line}")
            loops.append((match[1], least.get(None, 0), int(match[3])))
            scopes.append(("for", {}))
        elif match := _LET.fullmatch(line):
            scopes[-1][1][match[1]] = parsed(match[2])
        elif match := _ALLOCATE.fullmatch(line):
            name, shape = _plain(match[1]), tuple(map(int, match[3].split(" * ")[1:]))[::-1]
            if loops:
                if name in within:
                    raise ProgramError(f"{name}: expected one allocation, found another in line {number}: {line}")
                own = () if shape == (1,) else shape
                shape = (*(extent for _, _, extent in loops), *own)
                within[name] = tuple(loops), math.prod(own)
            allocated[name] = (shape, _word_type(name, match[2]))
        elif match := _STORE.fullmatch(line):
            name = _plain(match[1])
            _, _, index = _each(("load", name, parsed(match[2])), within)
            stores.append(_Store(name, index, parsed(match[3]), tuple(loops), line))
        else:
            raise ProgramError(
                "expected serial loops, lets, allocations and stores, as compute_root schedules give; found line "
                f"{number}: {line}"
            )
    return stores, allocated


def _each(e, within):
    """An expression whose loads of what is allocated `within` loops name the iteration, too."""
    match e:
        case ("load", name, index):
            index = _each(index, within)
            if name in within:
                loops, size = within[name]
                for variable, least, extent in reversed(loops):
                    step = (
                        "call",
                        "*",
                        (("call", "-", (("var", variable), ("num", least, None))), ("num", size, None)),
                    )
                    index, size = ("call", "+", (step, index)), size * extent
            return ("load", name, index)
        case ("cast", kind, value):
            return ("cast", kind, _each(value, within))
        case ("call", name, args):
            return ("call", name, tuple(_each(a, within) for a in args))
    return e


def _unfolded(name, shape, first):
    """The shape of an allocation that Halide states as one count of words: that of the loops which store it."""
    if len(shape) > 1 or name not in first:
        return shape
    terms, extents = _affine(first[name].index, first[name].line), {v: e for v, _, e in first[name].loops}
    atoms = sorted((a for a in terms if a is not None and a.kind == "var"), key=lambda a: -terms[a])
    found = tuple(extents[a.args[0]] for a in atoms)
    copies, left = divmod(shape[0], math.prod(found))
    if left or [terms[a] for a in atoms] != [math.prod(found[d + 1 :]) for d in range(len(found))]:
        raise ProgramError(f"{name}: expected {shape[0]} words stored by dense loops, found line: {first[name].line}")
    return (copies, *found) if copies > 1 else found


class _Reader:
    """Expressions: ("num", value, type), ("var", name), ("load", name, index), ("call", name, args) and
    ("cast", type, value); operators are calls."""

    def __init__(self, text, line, known):
        self.line, self.known, self.tokens, at = line, known, [], 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ProgramError(
                    f"expected an expression of 16-bit words and indices, found {text[at:]!r} in: {line}"
                )
            self.tokens.append(match[0].strip())
            at = match.end()

    def whole(self):
        found = self.level(0)
        if self.tokens:
            raise ProgramError(f"expected the end of an expression, found {self.tokens[0]!r} in: {self.line}")
        return found

    def next(self, expected=None):
        token = self.tokens.pop(0) if self.tokens else "the end"
        if expected is not None and token != expected:
            raise ProgramError(f"expected {expected!r}, found {token!r} in: {self.line}")
        return token

    def level(self, number):
        if number == len(_LEVELS):
            return self.unary()
        found = self.level(number + 1)
        while self.tokens and self.tokens[0] in _LEVELS[number]:
            sign = self.next()
            found = ("call", sign, (found, self.level(number + 1)))
        return found

    def unary(self):
        token = self.next()
        if token == "-":
            return ("call", "-", (("num", 0, None), self.unary()))
        if token == "!":
            return ("call", "!", (self.unary(),))
        if token == "(":
            if self.tokens[:2] and self.tokens[0] in (*TYPES, "int32", "uint32", "uint1") and self.tokens[1] == ")":
                kind = self.next()
                self.next(")")
                value = self.unary()
                return ("num", value[1], kind) if value[0] == "num" else value
            found = self.level(0)
            self.next(")")
            return found
        if token.isdigit():
            return ("num", int(token), None)
        if not re.match(r"[A-Za-z_]", token):
            raise ProgramError(f"expected a value, found {token!r} in: {self.line}")
        if self.tokens and self.tokens[0] == "[":
            self.next("[")
            place = self.level(0)
            self.next("]")
            return ("load", _plain(token), place)
        if self.tokens and self.tokens[0] == "(":
            self.next("(")
            args = [self.level(0)]
            while self.tokens and self.tokens[0] == ",":
                self.next(",")
                args.append(self.level(0))
            self.next(")")
            return ("cast", token, args[0]) if token in (*TYPES, "int32") else ("call", token, tuple(args))
        return self.known.get(token, ("var", token))


def _affine(e, line):
    """An index as ``{atom: factor}``; None stands for the constant. Atoms are `Index`es of loops, or of a floor
    division or modulo of such sums."""
    match e:
        case ("num", value, _):
            return {None: value}
        case ("var", name):
            return {expressions.Index("var", (name,)): 1}
        case ("cast", "int32", value):
            return _affine(value, line)
        case ("call", "+" | "-" as sign, (left, right)):
            total = dict(_affine(left, line))
            for atom, factor in _affine(right, line).items():
                total[atom] = total.get(atom, 0) + (factor if sign == "+" else -factor)
            return {a: f for a, f in total.items() if f}
        case ("call", "*", (left, right)):
            one, other = _affine(left, line), _affine(right, line)
            if set(one) - {None}:
                one, other = other, one
            if not set(one) - {None}:
                return {a: f * one.get(None, 0) for a, f in other.items() if one.get(None, 0)}
        case ("call", "/" | "%" as sign, (left, ("num", value, _))) if value > 0:
            inner = _index(_affine(left, line))
            if inner.kind == "const":
                return {None: inner.args[0] // value if sign == "/" else inner.args[0] % value}
            return {inner // value if sign == "/" else inner % value: 1}
    raise ProgramError(f"expected an index that is affine in the loops, found line: {line}")


def _index(terms):
    """The `expressions.Index` of a sum."""
    parts = [atom if factor == 1 else atom * factor for atom, factor in terms.items() if atom is not None]
    constant = terms.get(None, 0)
    if constant or not parts:
        parts.append(expressions.index(constant))
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


def _span(terms, ranges):
    """Least and largest value of a sum."""
    low = high = terms.get(None, 0)
    for atom, factor in terms.items():
        if atom is not None:
            least, most = _range(atom, ranges)
            low, high = low + min(factor * least, factor * most), high + max(factor * least, factor * most)
    return low, high


def _range(atom, ranges):
    if atom.kind == "var":
        return ranges[atom.args[0]]
    if atom.kind == "const":
        return atom.args[0], atom.args[0]
    spans = [_range(a, ranges) for a in atom.args if isinstance(a, expressions.Index)]
    match atom.kind:
        case "add":
            return sum(s[0] for s in spans), sum(s[1] for s in spans)
        case "mul":
            ends = sorted(v * atom.args[1] for v in spans[0])
            return ends[0], ends[1]
        case "floordiv":
            return spans[0][0] // atom.args[1], spans[0][1] // atom.args[1]
    return 0, atom.args[1] - 1


def _places(index, shape, store):
    """One sum for each dimension of `shape` from a flat index: the strides say what belongs where."""
    terms = _affine(index, store.line)
    ranges = {name: (least, least + extent - 1) for name, least, extent in store.loops}
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

    def split(left, d):
        if d == len(shape):
            return [] if not {a for a, f in left.items() if f} else None
        stride = strides[d]
        mine = {a: f // stride for a, f in left.items() if a is not None and f // stride}
        rest = {a: f % stride for a, f in left.items() if a is not None and f % stride}
        constant = left.get(None, 0)
        for own in (constant // stride, constant // stride + 1):
            here = mine | ({None: own} if own else {})
            low, high = _span(here, ranges)
            if low < 0 or high >= shape[d]:
                continue
            behind = split(rest | ({None: constant - own * stride} if constant != own * stride else {}), d + 1)
            if behind is not None:
                return [here, *behind]
        return None

    found = split(terms, 0)
    if found is None:
        raise ProgramError(f"expected an index of the shape {shape}, found line: {store.line}")
    return found


def _constant_dimensions(stores, extents):
    """By name, the dimensions that every load and store names by a constant: these are laid out in space."""
    found: dict[str, set[int]] = {}
    for store in stores:
        for name, index in [(store.name, store.index), *_loads(store.value)]:
            if name not in extents:
                raise ProgramError(f"{name}: expected an input, an allocated buffer or an output; line: {store.line}")
            try:
                places = _places(index, extents[name], store)
            except ProgramError:
                # One that folds at a border, see `_folded`.
                places = [{"": 1}] * len(extents[name])
            fixed = {d for d, p in enumerate(places) if not set(p) - {None}}
            found[name] = found.get(name, fixed) & fixed
    return {name: tuple(sorted(fixed)) for name, fixed in found.items()}


def _loads(e):
    match e:
        case ("load", name, index):
            yield name, index
        case ("cast", _, value):
            yield from _loads(value)
        case ("call", _, args):
            for a in args:
                yield from _loads(a)


def _stage(name, shape, dtype, stores, sources, extents):
    """The `dsl.Stage` that `stores` make."""
    placed = [(store, _places(store.index, shape, store)) for store in stores]
    constant = [
        {d: p.get(None, 0) for d, p in enumerate(ps) if not set(p) - {None} and shape[d] > 1} for _, ps in placed
    ]
    # In space are dimensions that each store names by a constant, and all of whose values are there.
    common = sorted(set(constant[0]).intersection(*constant[1:]))
    unroll = tuple(d for d in common if {each[d] for each in constant} == set(range(shape[d])))
    lanes: dict[tuple, list] = {}
    for each, part in zip(constant, placed, strict=True):
        lanes.setdefault(tuple((d, each[d]) for d in unroll), []).append(part)
    if len(lanes) != math.prod(shape[d] for d in unroll):
        raise ProgramError(f"{name}: expected every copy of its unrolled dimensions to be stored, found {len(lanes)}")
    made = {fixed: _lane(name, shape, unroll, mine, sources, extents) for fixed, mine in lanes.items()}

    def make(*indices):
        fixed = tuple((d, int(indices[d])) for d in unroll)
        return made[fixed](*indices)

    stage = dsl.Stage(name, shape, make, dtype=dtype, unroll=unroll)
    for lane in dsl.lanes(stage):
        # Here, since whoever reads the stage later does not know the line that it came from.
        expressions.reads(stage.traced(*dsl.variables(stage, lane)))
    return stage


def _lane(name, shape, unroll, stores, sources, extents):
    """A function of a stage's indices that gives the word of one copy."""
    whole = [part for part in stores if name not in dict(_loads(part[0].value))]
    updates = [part for part in stores if part not in whole]
    if not whole:
        raise ProgramError(f"{name}: expected a store before its updates, found line: {stores[0][0].line}")
    _covered(name, shape, unroll, whole)
    parts, reduced, op = [], None, ""
    for store, places in updates:
        own = {a.args[0] for p in places for a in p if a is not None and a.kind == "var"}
        inner = tuple((v, least, extent) for v, least, extent in store.loops if v not in own)
        box = tuple(extent for _, _, extent in inner)
        match store.value:
            case ("call", "+" | "max" | "min" as sign, (("load", same, index), body)) if (same, index) == (
                name,
                store.index,
            ):
                pass
            case ("call", "+" | "max" | "min" as sign, (body, ("load", same, index))) if (same, index) == (
                name,
                store.index,
            ):
                pass
            case _:
                raise ProgramError(
                    f"{name}: expected an update that adds to itself, or takes its maximum or minimum, found line: "
                    f"{store.line}"
                )
        if reduced not in (None, box) or op not in ("", sign):
            raise ProgramError(
                f"{name}: expected updates over one box, found {reduced} ({op}) and {box} ({sign}); line: {store.line}"
            )
        reduced, op = box, sign
        _covered(name, shape, unroll, [(store, places)])
        parts.append((store, places, inner, body))

    def first(*indices):
        found = None
        for store, places in whole:
            values, region = _loops_of(name, shape, store, places, indices)
            word = _word(store.value, store, values, sources, extents)
            for d, (at, (low, high), extent) in enumerate(zip(indices, region, shape, strict=True)):
                if d in unroll:
                    continue
                if found is not None and high < extent - 1:
                    word = expressions.select(expressions.Coordinate(expressions.index(at)) <= high, word, found)
                if found is not None and low > 0:
                    word = expressions.select(expressions.Coordinate(expressions.index(at)) >= low, word, found)
            found = word
        return found

    def make(*indices):
        def summed(*place):
            total = None
            for store, places, inner, body in parts:
                values, _ = _loops_of(name, shape, store, places, indices)
                values |= {v: r + least for (v, least, _), r in zip(inner, place, strict=True)}
                word = _word(body, store, values, sources, extents)
                total = word if total is None else expressions.binary(op, total, word)
            return total

        found = dsl.Reduce(reduced, summed, op) if reduced else summed()
        known: Any = whole[0][0].value if len(whole) == 1 else ()
        same = known[:1] == ("num",) and _IDENTITIES[op, known[2] or "uint16"] == known[1]
        return found if same else expressions.binary(op, first(*indices), found)

    return make if parts else first


def _covered(name, shape, unroll, stores):
    """Raise `ProgramError` unless `stores` write all words of a copy."""
    there = np.zeros(shape, bool)
    for store, places in stores:
        _, region = _loops_of(name, shape, store, places, [expressions.index(0)] * len(shape))
        box = (slice(None) if d in unroll else slice(low, high + 1) for d, (low, high) in enumerate(region))
        there[tuple(box)] = True
    if not there.all():
        d = next((d for d in range(len(shape)) if not there.any(axis=tuple(set(range(len(shape))) - {d})).all()), 0)
        count = int(there.any(axis=tuple(set(range(len(shape))) - {d})).sum())
        raise ProgramError(
            f"{name}: expected a store of all {shape[d]} words along dimension {d}, found {count}; line: "
            f"{stores[0][0].line}"
        )


def _loops_of(name, shape, store, places, indices):
    """The value of each loop that a store names, for the indices of the stage, and the least and largest index in each
    dimension."""
    values, region, loops = {}, [], {v: (least, extent) for v, least, extent in store.loops}
    for d, place in enumerate(places):
        constant, step = place.get(None, 0), 1
        atoms = sorted((a for a in place if a is not None), key=lambda a: place[a])
        low = constant
        for atom in atoms:
            # Several loops along a dimension are those of a tile.
            if atom.kind != "var" or place[atom] != step or (loops[atom.args[0]][0] and len(atoms) > 1):
                raise ProgramError(f"{name}: expected a store at its own loops, found line: {store.line}")
            least, extent = loops[atom.args[0]]
            at = expressions.index(indices[d]) - constant
            at = at if step == 1 else at // step
            values[atom.args[0]] = at if atom is atoms[-1] else at % extent
            low, step = low + least, step * extent
        region.append((low, low + step - 1))
    return values, region


def _put(terms, values):
    """A sum as an index of the stage's loops."""
    found = None
    for atom, factor in terms.items():
        part = expressions.index(factor if atom is None else atom.evaluate(values))
        part = part if atom is None or factor == 1 else part * factor
        found = part if found is None else found + part
    return expressions.index(0) if found is None else found


def _word(e, store, values, sources, extents):
    """The expression of `dsl` for a value."""

    def word(part):
        return _word(part, store, values, sources, extents)

    def kind(part):
        """The type of a value, None for a number without one."""
        match part:
            case ("num", _, given) | ("cast", given, _):
                return given
            case ("load", name, _):
                return sources[name].dtype if name in sources else None
            case ("call", "select", (_, yes, no)):
                return kind(yes) or kind(no)
            case ("call", sign, args) if sign not in ("<", "<=", ">", ">=", "==", "!=", "&&", "||", "!"):
                return next(filter(None, map(kind, args)), None)
        return None

    match e:
        case ("num", value, _):
            return expressions.as_expression(value)
        case ("load", name, index):
            if name not in sources:
                raise ProgramError(f"{name}: expected a source that is stored before it is loaded; line: {store.line}")
            try:
                places = _places(index, extents[name], store)
            except ProgramError:
                return _folded(index, store, values, sources[name])
            return sources[name][tuple(_put(place, values) for place in places)]
        case ("cast", "uint8", value):
            return word(value) if kind(value) == "uint8" else (word(value) & 255).as_unsigned()
        case ("cast", given, value) if given in TYPES:
            inner = word(value)
            return inner if inner.signed == (given == "int16") else _as(inner, given)
        case ("call", "/" | "%" as sign, (left, ("num", value, _))) if value > 0:
            return word(left) // value if sign == "/" else word(left) % value
        case ("call", "select", (condition, yes, no)):
            return expressions.select(word(condition), word(yes), word(no))
        case ("call", "abs", (value,)):
            return abs(word(value))
        case ("call", "!", (value,)):
            return word(value) == 0
        case ("call", sign, (("cast", "int32", inner), ("num", value, _))) if sign in (
            "min",
            "max",
            "<",
            "<=",
            ">",
            ">=",
            "==",
            "!=",
        ) and value in _RANGES.get(kind(inner), ()):
            # Compared with a number of its own type, a word need not be wider.
            return word(("call", sign, (inner, ("num", value, None))))
        case ("call", ">" | ">=" as sign, (left, right)):
            return expressions.binary({">": "<", ">=": "<="}[sign], word(right), word(left))
        case ("call", name, (left, right)) if name in _BINARY:
            found = expressions.binary(_BINARY[name], word(left), word(right))
            # A sum of bytes is a byte.
            return found & 255 if kind(e) == "uint8" and _BINARY[name] in ("+", "-", "*", "<<") else found
        case ("var", name) if name in values:
            return expressions.as_expression(expressions.index(values[name]))
    raise ProgramError(f"expected the operators of a 16-bit PE, found {e[1]!r} in line: {store.line}")


def _folded(index, store, values, source):
    """A load whose index folds, as at borders: a choice among reads. Places are those that the loops go to."""
    grid = {v: least + np.arange(n) for v, least, n in store.loops}
    shape = tuple(len(a) for a in grid.values())
    grid = dict(zip(grid, np.meshgrid(*grid.values(), indexing="ij", sparse=True), strict=True))
    flat = np.broadcast_to(_number(index, grid, store.line), shape)
    if flat.min() < 0 or flat.max() >= math.prod(source.shape):
        raise ProgramError(f"{source.name}: expected an index within {source.shape}, found line: {store.line}")
    ways = []
    for place in np.unravel_index(flat, source.shape):
        for driver in _drivers(grid):
            across, first, back = np.unique(
                np.broadcast_to(sum(grid[v] for v in driver), shape), return_index=True, return_inverse=True
            )
            table = place.ravel()[first]
            if (table[back.reshape(shape)] == place).all():
                if not driver or len(set(table.tolist())) == 1:
                    ways.append([(expressions.index(int(table[0])), None)])
                else:
                    at = expressions.index(0)
                    for v in driver:
                        at = at + values[v]
                    ways.append(lowering.by_places(at, across, table))
                break
        else:
            raise ProgramError(f"expected an index that is affine in the loops, found line: {store.line}")

    def chosen(d, places):
        if d == len(ways):
            return source[places]
        (usual, _), *others = ways[d]
        found = chosen(d + 1, (*places, usual))
        for place, condition in others:
            found = expressions.select(condition, chosen(d + 1, (*places, place)), found)
        return found

    return chosen(0, ())


def _drivers(grid) -> Iterator[tuple[str, ...]]:
    """What may decide a place: no loop, one, or two whose values are summed."""
    yield from ((), *((v,) for v in grid), *((v, w) for v in grid for w in grid if v < w))


_NUMBERS: dict[str, Any] = {
    **{"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.floor_divide, "%": np.mod, "min": np.minimum},
    **{"max": np.maximum, "abs": np.abs, "select": np.where, "<": np.less, "<=": np.less_equal, ">": np.greater},
    **{">=": np.greater_equal, "==": np.equal, "!=": np.not_equal, "&&": np.logical_and, "||": np.logical_or},
    "!": np.logical_not,
}


def _number(e, grid, line):
    """The values of an index for those of the loops."""
    match e:
        case ("num", value, _):
            return value
        case ("var", name) if name in grid:
            return grid[name]
        case ("cast", "int32" | "uint32", value):
            return _number(value, grid, line)
        case ("call", name, args) if name in _NUMBERS:
            return _NUMBERS[name](*(_number(a, grid, line) for a in args))
    raise ProgramError(f"expected an index that is affine in the loops, found line: {line}")


def _as(value, kind):
    return value.as_signed() if kind == "int16" else value.as_unsigned()
