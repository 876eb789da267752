"""The words of an expression, by numpy on whole arrays: it knows no schedule, and all others are judged by it."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright.pushmem import expressions
from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.expressions import BITS, FOLDS, WORD, Expression, Index, Op, Read, number, of_indices


def stored(words: Any, dtype: str) -> np.ndarray:
    """Words as a buffer of `dtype` keeps them: their low bits."""
    return (np.asarray(words).astype(np.int64) & WORD).astype(np.uint16).astype(dtype)


def _cast(value: Any, signed: bool) -> np.ndarray:
    return (np.asarray(value).astype(np.int64) & WORD).astype(np.uint16).view(np.int16 if signed else np.uint16)


def words(e: Expression, values: dict[str, Any], arrays: dict[str, np.ndarray], asked: Any = True) -> np.ndarray:
    """The words of `e`. values: of loops. arrays: of sources. asked: where words count; elsewhere a read may be of any
    place."""
    match e:
        case expressions.Const():
            return _cast(e.value, e.signed)
        case expressions.Coordinate():
            return _cast(e.index.evaluate(values), False)
        case Read():
            places = [np.asarray(i.evaluate(values)) for i in e.indices]
            if e.border:
                return _beyond(e, places, arrays[e.source.name])
            for place, extent, i in zip(places, e.source.shape, e.indices, strict=True):
                _check_range(f"{e.source.name}: index {i}", place, asked, extent)
            return arrays[e.source.name][
                tuple(np.clip(p, 0, n - 1) for p, n in zip(places, e.source.shape, strict=True))
            ]
        case expressions.Lut():
            table = np.asarray(e.table, np.uint16)
            return table[_word(words(e.args[0], values, arrays, asked)) % len(e.table)]
        case expressions.Reduce():
            tail = (..., *[None] * len(e.extents))
            inner = {k: np.asarray(v)[tail] for k, v in values.items()}
            grids = np.meshgrid(*map(np.arange, e.extents), indexing="ij", sparse=True)
            inner |= {f"r{d}": g for d, g in enumerate(grids)}
            body = e.traced(*(Index("var", (f"r{d}",)) for d in range(len(e.extents))))
            word = words(body, inner, arrays, np.asarray(asked)[tail])
            word = np.broadcast_to(word, np.broadcast_shapes(word.shape, e.extents))
            axes = tuple(range(-len(e.extents), 0))
            reduce: Any = {"+": np.sum, "min": np.min, "max": np.max}[e.op]
            return _cast(reduce(word.astype(np.int64), axis=axes), body.signed)
    assert isinstance(e, Op)
    if e.name == "select" and of_indices(e.args[0]):
        first = words(e.args[0], values, arrays)
        sides = [
            words(a, values, arrays, asked & side) for a, side in zip(e.args[1:], (first != 0, first == 0), strict=True)
        ]
        return _cast(operate("select", e.signed, *map(_word, (first, *sides))), e.signed)
    return _cast(operate(e.name, e.signed, *(_word(words(a, values, arrays, asked)) for a in e.args)), e.signed)


def _beyond(e: Read, places: list[np.ndarray], array: np.ndarray) -> np.ndarray:
    """The words at any places of an array with a border."""
    inner = FOLDS["clamp" if e.border == "zero" else e.border]
    found = array[tuple(inner(place, extent) for place, extent in zip(places, array.shape, strict=True))]
    if e.border == "zero":
        for place, extent in zip(places, array.shape, strict=True):
            found = np.where((place >= 0) & (place < extent), found, 0).astype(array.dtype)
    return found


def _check_range(what: str, places: np.ndarray, asked: Any, extent: int) -> None:
    """Raise `ProgramError` unless all `places` that are `asked` are within 0 .. `extent` - 1."""
    beyond = (places < 0) | (places >= extent)
    if beyond.any() and (beyond & asked).any():
        asked_places = np.broadcast_to(places, np.broadcast_shapes(np.shape(places), np.shape(asked)))
        asked_places = asked_places[np.broadcast_to(asked, asked_places.shape)]
        low, high = int(asked_places.min()), int(asked_places.max())
        raise ProgramError(
            f"{what} spans {low}..{high}, not within 0..{extent - 1}; see bounded() for what stands beyond"
        )


def operate(name: str, signed: bool, *args: Any) -> np.ndarray:
    """The words that a PE's operation makes of words. Raises `ProgramError` for one that it does not have."""
    if name not in _OPERATIONS:
        raise ProgramError(f"unknown operation {name!r}")
    words = [number(a, signed and (place == 0 or name not in _OF_BITS)) for place, a in enumerate(args)]
    return _OPERATIONS[name](*words).astype(np.int64) & WORD


# Their other operands are bits, also where the first one is a signed number.
_OF_BITS = (">>", "<<", "select")
_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    # The upper half of a product of unsigned words.
    "high": lambda a, b: a * b >> BITS,
    "//": operator.floordiv,
    "%": operator.mod,
    # ASSUME: a PE shifts by the low four bits of the amount, as a 16-bit barrel shifter does.
    ">>": lambda a, b: a >> (b & 15),
    "<<": lambda a, b: a << (b & 15),
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "min": np.minimum,
    "max": np.maximum,
    "abs": abs,
    "bits": lambda a: a,
    "select": lambda a, b, c: np.asarray(np.where(a != 0, b, c)),
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


def _word(a: np.ndarray) -> np.ndarray:
    return a.astype(np.int64) & WORD
