"""The lowered program: buffers, statements and accesses, as plain records."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.pushmem import expressions, reference
from tilewright.pushmem.expressions import Index


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

    @functools.cached_property
    def needed(self) -> tuple[np.ndarray | None, ...]:
        """For each read the iterations that use its word, bool of the shape `extents`; None: all of them."""
        loops, masks = self.grid, [np.zeros(self.extents, bool) for _ in self.reads]

        def visit(e: Any, asked: np.ndarray) -> None:
            if e[0] == "read":
                masks[e[1]] |= asked
            elif by_indices(e):
                chosen = word(e[2], (), loops) != 0
                visit(e[3], asked & chosen)
                visit(e[4], asked & ~chosen)
            else:
                for each in e[2:]:
                    visit(each, asked)

        visit(self.expression, np.ones(self.extents, bool))
        return tuple(None if mask.all() else mask for mask in masks)

    @functools.cached_property
    def grid(self) -> dict[str, np.ndarray]:
        """The values of each loop, sparse arrays of int."""
        return dict(zip(self.loops, np.indices(self.extents, sparse=True), strict=True))

    def asked(self, read: int, values: Any) -> np.ndarray:
        """Those of `values`, numbers for each iteration, where the word of a read is used."""
        mask = self.needed[read]
        return np.asarray(values) if mask is None else np.broadcast_to(values, self.extents)[mask]


def of_indices(e: Any) -> bool:
    """Whether an expression of a `Statement` depends on no data."""
    return e[0] in ("const", "index") or (e[0] != "read" and all(map(of_indices, e[2:])))


def by_indices(e: Any) -> bool:
    """Whether an expression is a choice by indices, as borders make many."""
    return e[0] == "select" and of_indices(e[2])


def word(e: Any, reads: Sequence[np.ndarray], loops: dict[str, Any]) -> Any:
    """The words of an expression of a `Statement`. reads: those of its reads."""
    match e[0]:
        case "const":
            return np.int64(e[1])
        case "read":
            return reads[e[1]]
        case "index":
            return np.asarray(e[1].evaluate(loops)) & expressions.WORD
        case "lut":
            return np.asarray(e[1], np.int64)[word(e[2], reads, loops) % len(e[1])]
    return reference.operate(e[0], e[1], *(word(a, reads, loops) for a in e[2:]))


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
