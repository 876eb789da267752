"""Expressions of push-memory programs: 16-bit words by the operators of a PE, and the indices that they are read at.

An index is affine in the loop variables, with floor division, modulo, minimum and maximum by constants. An expression
is made of reads, constants and operators; each operation wraps around. `//` and `%` by constants are exact and round
down. Of a `select` on indices, only the side that is chosen is read.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tilewright.pushmem.errors import ProgramError

REDUCTIONS = ("+", "min", "max")
BITS = 16
WORD = (1 << BITS) - 1
# Of a number anywhere, the place within 0 .. n - 1 whose word stands there.
FOLDS: dict[str, Callable[[Any, int], Any]] = {
    "clamp": lambda at, n: np.clip(at, 0, n - 1),
    "mirror": lambda at, n: (n - 1) - abs((n - 1) - at % max(1, 2 * n - 2)),
    "symmetric": lambda at, n: np.minimum(at % (2 * n), 2 * n - 1 - at % (2 * n)),
    "wrap": lambda at, n: at % n,
}
# As numpy.pad names them: edge, constant, reflect, symmetric, wrap.
BORDERS = ("clamp", "zero", "mirror", "symmetric", "wrap")
INDICES: dict[str, Callable[[Any, Any], Any]] = FOLDS | {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass(frozen=True)
class Index:
    """An index expression. kind: var, const, add, mul, floordiv, mod, min, max or a border; args: its operands."""

    kind: str
    args: tuple[Any, ...]

    def __add__(self, other: Any) -> Index:
        # With data it is a word: the expression's own operator takes it.
        if isinstance(other, Expression):
            return NotImplemented
        other = index(other)
        if self.kind == "const":
            self, other = other, self
        if other.kind != "const":
            return Index("add", (self, other))
        if self.kind == "const" or (self.kind == "add" and self.args[1].kind == "const"):
            # Constants are put together, so that equal indices look alike.
            first = index(0) if self.kind == "const" else self.args[0]
            total = other.args[0] + (self if self.kind == "const" else self.args[1]).args[0]
            return index(total) if self.kind == "const" else first + total
        return Index("add", (self, other)) if other.args[0] else self

    __radd__ = __add__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Any) -> Index:
        return NotImplemented if isinstance(other, Expression) else self + -index(other)

    def __rsub__(self, other: Any) -> Index:
        return index(other) + -self

    def __mul__(self, other: Any) -> Index:
        if isinstance(other, Expression):
            return NotImplemented
        if isinstance(other, Index) and other.kind == "const":
            other = other.args[0]
        if isinstance(other, Index) and self.kind == "const":
            return other * self.args[0]
        if not isinstance(other, int | np.integer):
            raise ProgramError(f"an index has to be affine; found ({self}) * ({other})")
        return index(self.args[0] * int(other)) if self.kind == "const" else Index("mul", (self, int(other)))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Index:
        return Index("floordiv", (self, _divisor(self, "//", other)))

    def __mod__(self, other: Any) -> Index:
        return Index("mod", (self, _divisor(self, "%", other)))

    def __truediv__(self, other: Any) -> NoReturn:
        raise ProgramError(f"an index is divided by //, which rounds down; found ({self}) / ({other})")

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise ProgramError(f"an index is divided by positive constants only; found ({other}) / ({self})")

    __rfloordiv__ = __rmod__ = __rtruediv__

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, int | Expression):
            return as_expression(self) == other
        return isinstance(other, Index) and (self.kind, self.args) == (other.kind, other.args)

    def __ne__(self, other: Any) -> Any:
        if isinstance(other, int | Expression):
            return as_expression(self) != other
        return not self == other

    def __hash__(self) -> int:
        return hash((self.kind, self.args))

    def __str__(self) -> str:
        a = self.args
        match self.kind:
            case "var" | "const":
                return str(a[0])
            case "add":
                below = a[1].kind == "const" and a[1].args[0] < 0
                return f"{a[0]} - {-a[1].args[0]}" if below else f"{a[0]} + {a[1]}"
            case "mul":
                return f"{a[1]}*({a[0]})" if a[0].args[1:] else f"{a[1]}*{a[0]}"
            case "floordiv":
                return f"floor(({a[0]})/{a[1]})"
            case "mod":
                return f"(({a[0]}) mod {a[1]})"
        return f"{self.kind}({a[0]}, {a[1]})"

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Its value for the loop variables `values` (integers or arrays)."""
        if self.kind == "var":
            return values[self.args[0]]
        if self.kind == "const":
            return self.args[0]
        one, other = (a.evaluate(values) if isinstance(a, Index) else a for a in self.args)
        return INDICES[self.kind](one, other)

    def slope(self, name: str) -> Fraction:
        """Its mean growth per step of the loop variable `name`."""
        a = self.args
        match self.kind:
            case "var":
                return Fraction(int(a[0] == name))
            case "add":
                return a[0].slope(name) + a[1].slope(name)
            case "mul":
                return a[0].slope(name) * a[1]
            case "floordiv":
                return a[0].slope(name) / a[1]
            case "min" | "max" | "clamp":
                return a[0].slope(name)
        return Fraction(0)

    def names(self) -> set[str]:
        """The loop variables in it."""
        if self.kind == "var":
            return {self.args[0]}
        return set().union(*(a.names() for a in self.args if isinstance(a, Index)))


def _compared(name):
    """An operator that takes an index as a word."""

    def compare(self, other):
        return getattr(as_expression(self), name)(other)

    return compare


_WORDS = ("lt", "le", "gt", "ge", "lshift", "rshift", "and", "or", "xor", "rlshift", "rrshift", "rand", "ror", "rxor")


for _name in _WORDS:
    setattr(Index, f"__{_name}__", _compared(f"__{_name}__"))


def index(value: Any) -> Index:
    """`value` as an index: an `Index` or an integer. Raises `ProgramError` for anything else."""
    if isinstance(value, Index):
        return value
    if isinstance(value, int | np.integer):
        return Index("const", (int(value),))
    if isinstance(value, Coordinate):
        return value.index
    if isinstance(value, Const):
        return index(int(number(value.value, value.signed)))
    if isinstance(value, Op) and value.name in ("min", "max", "+", "-", "*") and of_indices(value):
        one, other = map(index, value.args)
        if value.name not in ("min", "max"):
            return {"+": operator.add, "-": operator.sub, "*": operator.mul}[value.name](one, other)
        one, other = (other, one) if one.kind == "const" else (one, other)
        if other.kind == "const":
            return Index(value.name, (one, other.args[0]))
    if isinstance(value, Expression):
        raise ProgramError(f"an index has to be affine in the loop variables; found the data {value}")
    raise ProgramError(f"an index has to be affine in the loop variables; found {value!r}")


def _divisor(left: Index, sign: str, right: Any) -> int:
    if not isinstance(right, int | np.integer) or right <= 0:
        raise ProgramError(f"an index is divided by positive constants only; found ({left}) {sign} ({right})")
    return int(right)


def _operators(name: str) -> tuple[Callable[[Any, Any], Op], Callable[[Any, Any], Op]]:
    """An operator of words, and the same of an operand that stands before a word."""
    return lambda word, other: binary(name, word, other), lambda word, other: binary(name, other, word)


class Expression:
    """A 16-bit value; operators of PEs build larger ones. `signed` decides shifts, minima, maxima and comparisons."""

    signed = False

    __add__ = _operators("+")[0]
    __sub__, __rsub__ = _operators("-")
    __mul__ = __rmul__ = _operators("*")[0]
    __rshift__, __rrshift__ = _operators(">>")
    __lshift__, __rlshift__ = _operators("<<")
    __and__ = __rand__ = _operators("&")[0]
    __or__ = __ror__ = _operators("|")[0]
    __xor__ = __rxor__ = _operators("^")[0]
    __lt__, __gt__ = _operators("<")
    __le__, __ge__ = _operators("<=")
    __eq__ = _operators("==")[0]  # type: ignore[assignment]
    __ne__ = _operators("!=")[0]  # type: ignore[assignment]
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __radd__(self, other: Any) -> Expression:
        # Python's own sum() begins with 0.
        return self if isinstance(other, int) and not other else binary("+", other, self)

    def __neg__(self) -> Op:
        return binary("-", 0, self)

    def __invert__(self) -> Op:
        return binary("^", self, WORD)

    def __abs__(self) -> Op:
        return Op("abs", (self,), self.signed)

    def __floordiv__(self, other: Any) -> Expression:
        return divide(self, other)

    def __mod__(self, other: Any) -> Expression:
        return (
            self - self // other * other
            if _constant(self, "%", other) < 0
            else Op("%", _both(self, other), self.signed)
        )

    def __divmod__(self, other: Any) -> tuple[Expression, Expression]:
        return self // other, self % other

    def __truediv__(self, other: Any) -> NoReturn:
        raise ProgramError(f"a word is whole: // rounds down, divide() has other roundings; found {self} / {other}")

    def __rtruediv__(self, other: Any) -> NoReturn:
        raise ProgramError(f"a word is divided by constants only; found {other} / {self}")

    __rfloordiv__ = __rmod__ = __rdivmod__ = __rtruediv__

    def __pow__(self, other: Any) -> NoReturn:
        raise ProgramError(f"a PE takes no powers: multiply, or look the power up in a Lut; found ({self}) ** {other}")

    def __rpow__(self, other: Any) -> NoReturn:
        raise ProgramError(f"a PE takes no powers: << has those of two, a Lut any; found {other} ** ({self})")

    def __bool__(self) -> NoReturn:
        raise ProgramError(
            f"a value known only at run time is neither true nor false; use select(), minimum() or maximum() for "
            f"{self}; an index has to be affine"
        )

    def as_signed(self) -> Expression:
        """The same bits, read as a two's-complement number."""
        return Op("bits", (self,), True)

    def as_unsigned(self) -> Expression:
        """The same bits, read as an unsigned number."""
        return Op("bits", (self,), False)


@dataclass(frozen=True, eq=False)
class Const(Expression):
    """A constant word. Negative values are stored in two's complement."""

    value: int
    signed: bool = False

    def __str__(self) -> str:
        return str(number(self.value, self.signed))


@dataclass(frozen=True, eq=False)
class Read(Expression):
    """The word of `source` at `indices`; border: what stands beyond it, see `bounded`."""

    source: Any
    indices: tuple[Index, ...]
    border: str = ""

    @property
    def signed(self) -> bool:  # type: ignore[override]  # nobody writes it
        """Whether the source's words are signed."""
        return self.source.dtype == "int16"

    def __str__(self) -> str:
        name = f"{self.border}({self.source.name})" if self.border else self.source.name
        return f"{name}[{', '.join(map(str, self.indices))}]"


@dataclass(frozen=True, eq=False)
class Coordinate(Expression):
    """The value of an index, as a word."""

    index: Index

    def __str__(self) -> str:
        return str(self.index)


@dataclass(frozen=True, eq=False)
class Op(Expression):
    """One operation of a PE."""

    name: str
    args: tuple[Expression, ...]
    signed: bool = False

    def __str__(self) -> str:
        if self.name == "bits":
            return f"({self.args[0]}).as_{'' if self.signed else 'un'}signed()"
        if self.name.isalpha():
            return f"{_SPOKEN.get(self.name, self.name)}({', '.join(map(str, self.args))})"
        return f" {self.name} ".join(f"({a})" if isinstance(a, Op) and len(a.args) > 1 else str(a) for a in self.args)


@dataclass(frozen=True, eq=False)
class Lut(Expression):
    """The entry of a constant table that data choose; the table's length is a power of two, the index wraps."""

    table: tuple[int, ...]
    args: tuple[Expression, ...]
    signed: bool = False

    def __str__(self) -> str:
        return f"Lut[{self.args[0]}]"

    @staticmethod
    def of(table: Sequence[int], value: Any) -> Lut:
        """`table[value mod len(table)]`. Raises `ProgramError` where the length is no power of two."""
        table = tuple(int(v) & WORD for v in table)
        if not table or len(table) & (len(table) - 1):
            raise ProgramError(f"expected a table whose length is a power of two, found {len(table)} entries")
        return Lut(table, (as_expression(value),))


@dataclass(frozen=True, eq=False)
class Reduce(Expression):
    """The sum (or min, max) of `body` over a box of further loop variables; `unroll` names loops done in space."""

    extents: tuple[int, ...]
    body: Callable[..., Expression]
    op: str = "+"
    unroll: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise ProgramError(f"unknown reduction {self.op!r}; known: {', '.join(REDUCTIONS)}")
        check_box("a reduction", self.extents, self.unroll)

    def __str__(self) -> str:
        return f"Reduce({self.extents}, {self.op})"

    def traced(self, *indices: Any) -> Expression:
        """The expression that is added at `indices`. Raises `ProgramError` for a function that takes others."""
        return called("a reduction", self.body, indices)


_PACKAGE = str(Path(__file__).parent)


def called(name: str, make: Callable[..., Any], indices: Sequence[Any]) -> Expression:
    """The expression that `make` gives. An error names the line of the program, and loops by the names in it."""
    try:
        return as_expression(make(*indices))
    except (TypeError, ProgramError) as error:
        text, trace = as_written(make, indices, str(error)), error.__traceback__
        line = None
        while trace is not None:
            place = trace.tb_frame.f_code.co_filename
            if not place.startswith(_PACKAGE):
                line = Path(place).name, trace.tb_lineno, linecache.getline(place, trace.tb_lineno).strip()
            trace = trace.tb_next
        if line is not None and "line " not in text:
            text = f"{text} ({line[0]}, line {line[1]}: {line[2]})"
        raise ProgramError(f"{name}: {text}") from error


def as_written(make: Callable[..., Any], indices: Sequence[Any], text: str) -> str:
    """`text` with the loops of `indices` by the names that the function `make` has for them."""
    try:
        names = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return text
    for at, spoken in zip(indices, names, strict=False):
        if isinstance(at, Index) and at.kind == "var":
            text = re.sub(rf"\b{at.args[0]}\b", spoken, text)
    return text


def check_box(name: str, shape: Any, unroll: Any) -> None:
    """Raise `ProgramError` unless `shape` is a box, and `unroll` are dimensions of it."""
    if not isinstance(shape, tuple) or not shape or any(not _whole(extent) or extent < 1 for extent in shape):
        raise ProgramError(f"{name}: expected a shape of positive integers, found {shape}")
    known = range(len(shape))
    if not isinstance(unroll, tuple) or any(not _whole(d) or d not in known for d in unroll):
        raise ProgramError(f"{name}: expected dimensions to unroll among {tuple(known)}, found {unroll}")
    if len(set(unroll)) < len(unroll):
        raise ProgramError(f"{name}: expected each dimension to unroll once, found {unroll}")


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def as_expression(value: Any) -> Expression:
    """`value` as an expression: an expression, an index or an integer that a word holds."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, Index):
        return Coordinate(value)
    if isinstance(value, bool | np.bool_):
        raise ProgramError(
            f"expected a 16-bit constant or an expression, found {value}; of two indices write (a - b) == 0 for a == b"
        )
    if isinstance(value, int | np.integer) and -(1 << (BITS - 1)) <= value <= WORD:
        return Const(int(value) & WORD, bool(value < 0))
    raise ProgramError(f"expected a 16-bit constant or an expression, found {value!r}")


def binary(name: str, left: Any, right: Any) -> Op:
    """An operation of two words."""
    left, right = as_expression(left), as_expression(right)
    typed = [a for a in (left, right) if not isinstance(a, Const | Coordinate)] or [left]
    signed = left.signed if name in (">>", "<<") else any(a.signed for a in typed)
    return Op(name, (left, right), signed)


_SPOKEN = {"min": "minimum", "max": "maximum"}


def _both(left: Any, right: Any) -> tuple[Expression, Expression]:
    return as_expression(left), as_expression(right)


def _constant(word: Expression, sign: str, divisor: Any) -> int:
    """A divisor. Raises `ProgramError` for one that is no constant, is 0 or too large for `word`."""
    given, divisor = divisor, int(divisor) if isinstance(divisor, int | np.integer) else 0
    if not divisor or isinstance(given, bool):
        raise ProgramError(f"a word is divided by constants other than 0 only; found ({word}) {sign} ({given})")
    if not word.signed and divisor < 0:
        raise ProgramError(
            f"an unsigned word is divided by positive constants; found ({word}) {sign} ({divisor}); see as_signed()"
        )
    if abs(divisor) > (WORD // 2 if word.signed else WORD):
        raise ProgramError(f"expected a divisor of 16 bits, found ({word}) {sign} ({divisor})")
    return divisor


def divide(word: Any, divisor: int, rounding: str = "down") -> Expression:
    """`word` divided by a constant, exactly.

    Parameters
    ----------
    word : Expression
        What is divided, a signed or an unsigned word.
    divisor : int
        A constant other than 0; of an unsigned word a positive one.
    rounding : str
        ``down`` as Python's ``//``, ``zero`` as C's, ``nearest`` with halves up.

    Returns
    -------
    Expression
        The quotient, of the type of `word`.

    Raises
    ------
    ProgramError
        For another divisor or rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.pushmem import dsl
    >>> line = dsl.Input("line", (4,), "int16")
    >>> thirds = dsl.Stage("thirds", (4,), lambda x: dsl.divide(line[x], 3, "nearest"), dtype="int16")
    >>> dsl.evaluate(thirds, {"line": np.array([-5, -1, 4, 5])})["thirds"]
    array([-2,  0,  1,  2], dtype=int16)
    """
    word, known = as_expression(word), ("down", "zero", "nearest")
    divisor = _constant(word, "//", divisor)
    if rounding not in known:
        raise ProgramError(f"unknown rounding {rounding!r}; known: {', '.join(known)}")
    if rounding == "nearest":
        whole, rest = word // abs(divisor), (word % abs(divisor)).as_unsigned()
        half = abs(divisor) // 2
        return whole + (rest >= abs(divisor) - half) if divisor > 0 else 0 - whole - (rest > half)
    if rounding == "zero" and word.signed:
        whole = abs(word).as_unsigned() // abs(divisor)
        return select((word < 0) if divisor > 0 else (word >= 0), 0 - whole, whole).as_signed()
    if divisor < 0:
        return 0 - word // -divisor - (word % -divisor != 0)
    return Op("//", _both(word, divisor), word.signed)


def saturate(word: Any) -> Op:
    """`word` as one of 8 bits: 0 below 0, 255 above 255. A stage of uint8 alone keeps the low 8 bits."""
    word = as_expression(word)
    return minimum(maximum(word, 0) if word.signed else word, 255)


def select(condition: Any, yes: Any, no: Any) -> Op:
    """`yes` where `condition` is not zero, else `no`. Of a condition on indices, only the side that it chooses is
    read."""
    yes, no = as_expression(yes), as_expression(no)
    return Op("select", (as_expression(condition), yes, no), yes.signed or no.signed)


def minimum(left: Any, right: Any) -> Op:
    """The smaller of two words."""
    return binary("min", left, right)


def maximum(left: Any, right: Any) -> Op:
    """The larger of two words."""
    return binary("max", left, right)


def reads(expression: Expression) -> list[Read]:
    """The reads in `expression`, from left to right."""
    if isinstance(expression, Read):
        return [expression]
    if isinstance(expression, Reduce):
        return reads(expression.traced(*(Index("var", (f"r{d}",)) for d in range(len(expression.extents)))))
    return [r for a in getattr(expression, "args", ()) for r in reads(a)]


def of_indices(e: Expression) -> bool:
    """Whether `e` depends on no data."""
    if isinstance(e, Read | Reduce):
        return False
    return all(map(of_indices, getattr(e, "args", ())))


def number(a: Any, signed: bool) -> np.ndarray:
    """The numbers that words stand for."""
    word = np.asarray(a, np.int64)
    return np.where(word > WORD // 2, word - WORD - 1, word) if signed else word
