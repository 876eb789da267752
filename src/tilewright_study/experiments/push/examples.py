"""Example streams by name, such as ``identity-16x16``. Each is defined by what must come out, and knows no tile."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.pushmem.memories import Parameters
from tilewright.pushmem.streams import Stream, of_moves

# What comes in, int64 [words], the cycle of each, and for each output ``(cycles, words)``: when which one comes out.
Moves = tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]


class _Family(NamedTuple):
    """naming: how names look, of `count` numbers. least: of each number. moves: what the numbers stand for."""

    naming: str
    least: tuple[int, ...]
    moves: Callable[..., Moves]


def stream(name: str, parameters: Parameters) -> Stream:
    """The `Stream` of an example at the top of a tile with `parameters` of `memories`. Raises `TilewrightError`."""
    family, _, text = name.partition("-")
    if family not in _FAMILIES:
        raise UnknownNameError("stream", name, NAMES)
    naming, least, moves = _FAMILIES[family]
    parts = text.replace("x", "-").split("-")
    if len(parts) != len(least) or any(not p.isdigit() or int(p) < low for p, low in zip(parts, least, strict=True)):
        raise ConfigError(f"stream {name!r}: expected {naming}")
    arrivals, reads = moves(*map(int, parts))
    if len(reads) > parameters.outputs:
        raise ConfigError(f"stream {name!r}: expected at most {parameters.outputs} outputs, found {len(reads)}")
    if len(arrivals) > 1 << parameters.bits:
        raise ConfigError(
            f"stream {name!r}: expected at most {1 << parameters.bits} words, which have {parameters.bits} bits, found "
            f"{len(arrivals)}"
        )
    return of_moves(arrivals, reads, parameters)


def raster(width: int, height: int, pitch: int | None = None, start: int = 0) -> np.ndarray:
    """int64 [height * width]: cycles of an image's words, a row every `pitch` cycles."""
    rows = np.arange(height)[:, None] * (pitch or width)
    return (start + rows + np.arange(width)).reshape(-1)


def _identity(width, height):
    """Words come out as they came in."""
    arrivals = raster(width, height)
    # The least delay that four words at a time allow: they fill, are written and read, and go out.
    return arrivals, [(arrivals + 7, np.arange(len(arrivals)))]


def _line_buffer(rows, width, height):
    """Rows of a stencil: while a row comes in, the rows above it come out, each on an output of its own."""
    shown = height - rows + 1
    if shown < 1:
        raise ConfigError(f"line_buffer: expected at least {rows} rows of the image, found {height}")
    # Two cycles are of the newest row, which does not go through the tile, and of its registers.
    at, words = raster(width, shown, start=(rows - 1) * width + 2), np.arange(shown * width)
    return raster(width, height), [(at, words + width * above) for above in reversed(range(rows - 1))]


def _strided(step, width, height):
    """Every so many words of every so many rows, in the raster of the image that comes in."""
    arrivals = raster(width, height)
    words = np.arange(width * height).reshape(height, width)[::step, ::step].reshape(-1)
    return arrivals, [(arrivals[words] + 10, words)]


def _transposed(width, height):
    """Columns of an image, once all of it is there."""
    count = np.arange(width * height)
    return raster(width, height), [(len(count) + 8 + count, count.reshape(height, width).T.reshape(-1))]


def _rows_with_gaps(gap, width, height):
    """Rows with a gap behind each, as a stage of a cascade gives them, and the row above beside them."""
    pitch, words = width + gap, np.arange(width * (height - 2))
    at = raster(width, height - 2, pitch, start=2 * pitch + 2)
    return raster(width, height, pitch), [(at, words + width), (at, words)]


_FAMILIES = {
    "identity": _Family("identity-<width>x<height>, such as identity-16x16", (1, 1), _identity),
    "line_buffer": _Family(
        "line_buffer-<rows>-<width>x<height>, of 2 or 3 rows, such as line_buffer-3-28x28", (2, 1, 2), _line_buffer
    ),
    "strided": _Family("strided-<step>-<width>x<height>, such as strided-2-32x32", (2, 1, 1), _strided),
    "transposed": _Family("transposed-<width>x<height>, such as transposed-16x16", (1, 1), _transposed),
    "rows_with_gaps": _Family(
        "rows_with_gaps-<gap>-<width>x<height>, such as rows_with_gaps-2-62x62", (1, 1, 3), _rows_with_gaps
    ),
}
NAMES = tuple(_FAMILIES)
