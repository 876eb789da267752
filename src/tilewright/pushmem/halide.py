"""A second front end: pipelines written in Halide, read from their lowered loop nests.

`outputs` lowers a `halide.Func` whose schedule is ``compute_root`` for each stage, and reads the text of Halide's own
lowered statement: loops, lets, allocations, stores and loads. Each function becomes a stage of `dsl`; an update that
adds to itself over an `RDom` becomes a sum over these loops, and functions or sums that were unrolled are laid out in
space. Words have 16 bits, as everywhere here; bounds and strides are those of the shapes that are given.

Halide simplifies and reorders expressions before it lowers them. So operands of sums and products may stand otherwise
than in a program that is written in `dsl`; reads, loops, schedules and words are the same. Needs the package `halide`
(the extra of this name). The syntax is that of Halide 21.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tilewright.pushmem import dsl
from tilewright.pushmem.errors import ProgramError, need

# ``(shape, type)`` by name.
Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
TYPES = ("uint16", "int16")
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][\w.$]*)|(<=|>=|==|!=|&&|\|\||[-+*/%<>()\[\],!]))")
_FOR = re.compile(r"for \(([\w.$]+), (.+), (\d+)\) \{")
_LET = re.compile(r"let ([\w.$]+) = (.+)")
_ALLOCATE = re.compile(r"allocate ([\w.$]+)\[(\w+)((?: \* \d+)+)\]")
_STORE = re.compile(r"([\w.$]+)\[(.+)\]\s=\s(.+)")
_SKIPPED = re.compile(r"module |external_plus_metadata |free |let [\w.$]+ = \(void \*\)_halide_buffer_get_host")
_LEVELS = (("||",), ("&&",), ("==", "!=", "<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%"))
_CALLS = {
    **{"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "shift_right": ">>", "shift_left": "<<"},
    **{"min": "min", "max": "max"},
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
            return _Reader(part, line, known).whole()

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
            shape = tuple(map(int, match[3].split(" * ")[1:]))[::-1]
            allocated[_plain(match[1])] = (shape, _word_type(_plain(match[1]), match[2]))
        elif match := _STORE.fullmatch(line):
            stores.append(_Store(_plain(match[1]), parsed(match[2]), parsed(match[3]), tuple(loops), line))
        else:
            raise ProgramError(
                "expected serial loops, lets, allocations and stores, as compute_root schedules give; found line "
                f"{number}: {line}"
            )
    return stores, allocated


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
            if self.tokens[:2] and self.tokens[0] in (*TYPES, "int32", "uint1") and self.tokens[1] == ")":
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
    """An index as ``{atom: factor}``; None stands for the constant. Atoms are `dsl.Index`es of loops, or of a floor
    division or modulo of such sums."""
    match e:
        case ("num", value, _):
            return {None: value}
        case ("var", name):
            return {dsl.Index("var", (name,)): 1}
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
    """The `dsl.Index` of a sum."""
    parts = [atom if factor == 1 else atom * factor for atom, factor in terms.items() if atom is not None]
    constant = terms.get(None, 0)
    if constant or not parts:
        parts.append(dsl.index(constant))
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
    spans = [_range(a, ranges) for a in atom.args if isinstance(a, dsl.Index)]
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
            places = _places(index, extents[name], store)
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
    lanes: dict[tuple, list] = {}
    for store in stores:
        places = _places(store.index, shape, store)
        fixed = tuple((d, p.get(None, 0)) for d, p in enumerate(places) if not set(p) - {None} and shape[d] > 1)
        lanes.setdefault(fixed, []).append((store, places))
    unroll = tuple(d for d, _ in next(iter(lanes)))
    if any(tuple(d for d, _ in fixed) != unroll for fixed in lanes) or len(lanes) != math.prod(
        shape[d] for d in unroll
    ):
        raise ProgramError(f"{name}: expected every copy of its unrolled dimensions to be stored, found {len(lanes)}")
    made = {fixed: _lane(name, shape, mine, sources, extents) for fixed, mine in lanes.items()}

    def make(*indices):
        fixed = tuple((d, int(indices[d])) for d in unroll)
        return made[fixed](*indices)

    stage = dsl.Stage(name, shape, make, dtype=dtype, unroll=unroll)
    for lane in dsl.lanes(stage):
        # Here, since whoever reads the stage later does not know the line that it came from.
        dsl.reads(stage.traced(*dsl.variables(stage, lane)))
    return stage


def _lane(name, shape, stores, sources, extents):
    """A function of a stage's indices that gives the word of one copy."""
    first, *updates = stores
    if not updates:
        return _word_of(name, shape, *first, sources, extents)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
    if first[0].value[:2] != ("num", 0):
        raise ProgramError(f"{name}: expected a sum that begins with 0, found line: {first[0].line}")
    parts, reduced = [], None
    for store, places in updates:
        own = {a.args[0] for p in places for a in p if a is not None and a.kind == "var"}
        inner = tuple((v, least, extent) for v, least, extent in store.loops if v not in own)
        box = tuple(extent for _, _, extent in inner)
        if reduced not in (None, box):
            raise ProgramError(f"{name}: expected updates over one box, found {reduced} and {box}; line: {store.line}")
        reduced = box
        match store.value:
            case ("call", "+", (("load", same, index), body)) if same == name and index == store.index:
                pass
            case ("call", "+", (body, ("load", same, index))) if same == name and index == store.index:
                pass
            case _:
                raise ProgramError(f"{name}: expected an update that adds to itself, found line: {store.line}")
        parts.append((store, places, inner, body))
    assert reduced is not None

    def make(*indices):
        def summed(*place):
            total = None
            for store, places, inner, body in parts:
                values = _loops_of(name, shape, store, places, indices)
                values |= {v: r + least for (v, least, _), r in zip(inner, place, strict=True)}
                word = _word(body, store, values, sources, extents)
                total = word if total is None else total + word
            return total

        return dsl.Reduce(reduced, summed) if reduced else summed()

    return make


def _word_of(name, shape, store, places, sources, extents):
    def make(*indices):
        return _word(store.value, store, _loops_of(name, shape, store, places, indices), sources, extents)

    return make


def _loops_of(name, shape, store, places, indices):
    """The value of each loop that a store names, for the indices of the stage."""
    values, loops = {}, {v: (least, extent) for v, least, extent in store.loops}
    for d, place in enumerate(places):
        atoms = [a for a in place if a is not None]
        if not atoms:
            continue
        (atom,) = atoms if len(atoms) == 1 else (None,)
        if atom is None or atom.kind != "var" or place[atom] != 1:
            raise ProgramError(f"{name}: expected a store at its own loops, found line: {store.line}")
        least, extent = loops[atom.args[0]]
        if least + place.get(None, 0) != 0 or extent != shape[d]:
            raise ProgramError(
                f"{name}: expected a store of all {shape[d]} words along dimension {d}, found {extent} from "
                f"{least + place.get(None, 0)}; line: {store.line}"
            )
        values[atom.args[0]] = dsl.index(indices[d]) + least if least else indices[d]
    return values


def _put(terms, values):
    """A sum as an index of the stage's loops."""
    found = None
    for atom, factor in terms.items():
        part = dsl.index(factor if atom is None else atom.evaluate(values))
        part = part if atom is None or factor == 1 else part * factor
        found = part if found is None else found + part
    return dsl.index(0) if found is None else found


def _word(e, store, values, sources, extents):
    """The expression of `dsl` for a value."""

    def word(part):
        return _word(part, store, values, sources, extents)

    match e:
        case ("num", value, _):
            return dsl.as_expression(value)
        case ("load", name, index):
            if name not in sources:
                raise ProgramError(f"{name}: expected a source that is stored before it is loaded; line: {store.line}")
            places = _places(index, extents[name], store)
            return sources[name][tuple(_put(place, values) for place in places)]
        case ("cast", kind, value) if kind in TYPES:
            inner = word(value)
            return inner if inner.signed == (kind == "int16") else _as(inner, kind)
        case ("call", "/", (left, ("num", value, _))) if value > 0 and not value & (value - 1):
            return word(left) >> (value.bit_length() - 1)
        case ("call", "%", (left, ("num", value, _))) if value > 0 and not value & (value - 1):
            return word(left) & (value - 1)
        case ("call", "select", (condition, yes, no)):
            return dsl.select(word(condition), word(yes), word(no))
        case ("call", "abs", (value,)):
            return abs(word(value))
        case ("call", "!", (value,)):
            return word(value) == 0
        case ("call", name, (left, right)) if name in ("&&", "||", *_CALLS):
            sign = {"&&": "&", "||": "|"}.get(name) or _CALLS[name]
            return dsl.binary(sign, word(left), word(right))
        case ("call", ">" | ">=" as sign, (left, right)):
            return dsl.binary({">": "<", ">=": "<="}[sign], word(right), word(left))
        case ("call", "+" | "-" | "*" | "<" | "<=" | "==" | "!=" as sign, (left, right)):
            return dsl.binary(sign, word(left), word(right))
        case ("var", name) if name in values:
            return dsl.as_expression(dsl.index(values[name]))
    raise ProgramError(f"expected the operators of a 16-bit PE, found {e[1]!r} in line: {store.line}")


def _as(value, kind):
    return value.as_signed() if kind == "int16" else value.as_unsigned()
