"""The language of push-memory programs: inputs and stages, whose words are `expressions`.

`bounded` says what stands beyond the borders of an array. `evaluate` computes a program on whole arrays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np

from tilewright.pushmem import expressions, reference
from tilewright.pushmem.errors import ProgramError
from tilewright.pushmem.expressions import Expression, Lut, Reduce, divide, maximum, minimum, saturate, select

# What programs are written with.
__all__ = [
    "Expression", "Input", "Lut", "Reduce", "Source", "Stage", "bounded", "divide", "evaluate", "maximum", "minimum",
    "saturate", "select",
]  # fmt: skip

DTYPES = ("uint16", "int16", "uint8")


@dataclass(frozen=True, eq=False)
class Source:
    """What a read names: an input or a stage. unroll: dimensions laid out in space, a buffer for each value."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "uint16"
    unroll: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ProgramError(f"{self.name}: unknown type {self.dtype!r}; known: {', '.join(DTYPES)}")
        for key in ("shape", "unroll"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, tuple(getattr(self, key)))
        if not isinstance(self.name, str) or not re.fullmatch(r"(?!__)[A-Za-z_][A-Za-z_0-9]*", self.name):
            raise ProgramError(f"expected a name of letters, digits and _, found {self.name!r}")
        expressions.check_box(self.name, self.shape, self.unroll)

    def __getitem__(self, indices: Any) -> expressions.Read:
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != len(self.shape):
            raise ProgramError(f"{self.name} has {len(self.shape)} dimensions; found {len(indices)} indices")
        return expressions.Read(self, tuple(expressions.index(i) for i in indices))

    def __setitem__(self, indices: Any, value: Any) -> NoReturn:
        raise ProgramError(
            f"{self.name}: a stage writes each of its words once, at its own loop variables; stores at other addresses "
            "are not supported"
        )


@dataclass(frozen=True, eq=False)
class Bounded:
    """A source that is read anywhere, see `bounded`."""

    source: Source
    border: str

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the source."""
        return self.source.shape

    def __getitem__(self, indices: Any) -> expressions.Read:
        return expressions.Read(self.source, self.source[indices].indices, self.border)


def bounded(source: Source, border: str) -> Bounded:
    """`source` with words beyond its borders.

    Parameters
    ----------
    source : Input or Stage
        What is read.
    border : str
        ``clamp``: the nearest word; ``zero``: 0; ``mirror``: as in a mirror at the last word, which is not repeated;
        ``symmetric``: the same with the last word repeated; ``wrap``: the words from the other side. NumPy's ``pad``
        names them edge, constant, reflect, symmetric and wrap.

    Returns
    -------
    Bounded
        It is read as `source` is, at any index.

    Raises
    ------
    ProgramError
        For an unknown border.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.pushmem import dsl
    >>> line = dsl.Input("line", (4,))
    >>> near = dsl.bounded(line, "clamp")
    >>> sums = dsl.Stage("sums", (4,), lambda x: near[x - 1] + near[x + 1])
    >>> dsl.evaluate(sums, {"line": np.array([1, 2, 3, 4])})["sums"]
    array([3, 4, 6, 7], dtype=uint16)
    """
    if border not in expressions.BORDERS:
        raise ProgramError(f"unknown border {border!r}; known: {', '.join(expressions.BORDERS)}")
    if not isinstance(source, Source):
        raise ProgramError(f"expected an input or a stage, found {source!r}")
    return Bounded(source, border)


@dataclass(frozen=True, eq=False)
class Input(Source):
    """An input of a program: an image or array whose words arrive in raster order.

    Parameters
    ----------
    name : str
        Letters, digits and ``_``.
    shape : tuple of int
        Words in each dimension.
    dtype : str
        ``uint16``, ``int16`` or ``uint8``. A stage of uint8 keeps the low 8 bits of its words, see `saturate`.
    unroll : tuple of int
        Dimensions laid out in space: each of their values has a buffer of its own.
    """


@dataclass(frozen=True, eq=False)
class Stage(Source):
    """A stage of a program: a function on a box of words.

    Parameters
    ----------
    name : str
        Letters, digits and ``_``.
    shape : tuple of int
        Words in each dimension.
    make : callable
        ``make(*indices)`` returns the expression of one word. Sources are read by indices, ``source[y, x + 1]``.
    dtype : str
        ``uint16``, ``int16`` or ``uint8``. A stage of uint8 keeps the low 8 bits of its words, see `saturate`.
    unroll : tuple of int
        Dimensions laid out in space: each of their values has a buffer of its own.
    order : str or sequence of str, optional
        Loops of a reduction in time, outermost first, such as ``("i0", "i1", "r1", "r0")`` (i: index, r: reduced; loops
        in space are left out). ``auto`` takes the fastest order, None the written one.

    Examples
    --------
    >>> from tilewright.pushmem import dsl, mapping
    >>> image = dsl.Input("image", (16, 16))
    >>> blur = dsl.Stage("blur", (14, 16), lambda y, x: (image[y, x] + image[y + 1, x] + image[y + 2, x]) >> 1)
    >>> mapped = mapping.compile(blur)
    >>> len(mapped.tiles), mapped.pes
    (1, 3)
    """

    make: Callable[..., Any] = field(default=None)  # type: ignore[assignment]
    order: Any = None

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        make: Callable[..., Any],
        *,
        dtype: str = "uint16",
        unroll: tuple[int, ...] = (),
        order: str | Sequence[str] | None = None,
    ):
        for key, value in {"name": name, "shape": shape, "dtype": dtype, "unroll": unroll}.items():
            object.__setattr__(self, key, value)
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "order", order)
        self.__post_init__()

    def traced(self, *indices: Any) -> Expression:
        """The expression of the word at `indices`. Raises `ProgramError` for a function that takes others."""
        return expressions.called(self.name, self.make, indices)


def lanes(source: Source) -> list[dict[int, int]]:
    """What the unrolled dimensions of `source` can be: a dict from dimension to value for each copy in space."""
    ranges = [range(source.shape[d]) for d in source.unroll]
    return [dict(zip(source.unroll, values, strict=True)) for values in itertools.product(*ranges)]


def variables(source: Source, lane: dict[int, int]) -> tuple[expressions.Index | int, ...]:
    """The loop variables i0, i1 … of `source`; unrolled dimensions are the integers of `lane`."""
    return tuple(lane.get(d, expressions.Index("var", (f"i{d}",))) for d in range(len(source.shape)))


# What a program gives: a stage, or several.
Outputs: TypeAlias = Source | Iterable[Source]


def stages(outputs: Outputs) -> tuple[Stage, ...]:
    """The outputs of a program: a stage, or several. Raises `ProgramError` for anything else."""
    if not isinstance(outputs, Source | Iterable):
        raise ProgramError(f"expected stages as outputs, found {outputs!r}")
    found: list[Stage] = []
    for each in (outputs,) if isinstance(outputs, Source) else outputs:
        if not isinstance(each, Stage):
            raise ProgramError(f"expected stages as outputs, found {getattr(each, 'name', each)!r}")
        if each in found:
            raise ProgramError(f"{each.name}: expected each output once, found it twice")
        found.append(each)
    if not found:
        raise ProgramError("expected at least one stage as output, found none")
    return tuple(found)


def stages_of(outputs: Outputs) -> list[Source]:
    """All sources that `outputs` need, each after what it reads. Raises `ProgramError`."""
    order: list[Source] = []
    state: dict[int, int] = {}

    def visit(source, path):
        if state.get(id(source)) == 2:
            return
        if state.get(id(source)) == 1:
            raise ProgramError(f"stages read each other in a cycle: {' -> '.join([*path, source.name])}")
        state[id(source)] = 1
        if isinstance(source, Stage):
            for lane in lanes(source):
                for read in expressions.reads(source.traced(*variables(source, lane))):
                    visit(read.source, [*path, source.name])
        state[id(source)] = 2
        order.append(source)

    for output in stages(outputs):
        visit(output, [])
    names = [s.name for s in order]
    for name in names:
        if names.count(name) > 1:
            raise ProgramError(f"two inputs or stages are called {name!r}")
    return order


def evaluate(outputs: Outputs, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute every stage of a program with numpy on whole arrays.

    Parameters
    ----------
    outputs : Stage or iterable of Stage
        Outputs of the program.
    data : dict
        Arrays of the inputs by name.

    Returns
    -------
    dict
        Arrays of the stages by name.

    Raises
    ------
    ProgramError
        For an array of another shape, and for a program with an error.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.pushmem import dsl
    >>> image = dsl.Input("image", (4,))
    >>> twice = dsl.Stage("twice", (4,), lambda x: image[x] * 2)
    >>> dsl.evaluate(twice, {"image": np.arange(4)})["twice"]
    array([0, 2, 4, 6], dtype=uint16)
    """
    arrays: dict[str, np.ndarray] = {}
    for source in stages_of(outputs):
        if isinstance(source, Stage):
            grids = np.meshgrid(*map(np.arange, source.shape), indexing="ij", sparse=True)
            values = {f"i{d}": g for d, g in enumerate(grids)}
            whole = np.empty(source.shape, source.dtype)
            for lane in lanes(source):
                place = tuple(lane.get(d, slice(None)) for d in range(len(source.shape)))
                inside = {n: v for n, v in values.items() if int(n[1:]) not in lane}
                shape = tuple(1 if d in lane else e for d, e in enumerate(source.shape))
                word = reference.words(source.traced(*variables(source, lane)), inside, arrays)
                whole[place] = reference.stored(np.broadcast_to(word, shape), source.dtype).reshape(whole[place].shape)
            arrays[source.name] = whole
        else:
            if source.name not in data or np.shape(data[source.name]) != source.shape:
                found = np.shape(data[source.name]) if source.name in data else "nothing"
                raise ProgramError(f"input {source.name}: expected the shape {source.shape}, found {found}")
            arrays[source.name] = np.asarray(data[source.name]).astype(source.dtype)
    return arrays
