"""Example streams, a family. Each is defined by what must come out, and knows no tile.

Contract of a member: ``NAMING``, how its names look, with an example. ``parse(text)``: parameters from what follows the
family's name, or None. ``moves(parameters) -> (arrivals, reads)``: arrivals, int64 [words], the cycle in which each
word comes in, one input; reads, a list for each output of ``(cycles, words)``: when which word comes out.
"""

from typing import TYPE_CHECKING

import numpy as np

from tilewright.core import registry
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.pushmem.streams import Stream

if TYPE_CHECKING:
    from tilewright.pushmem.memories import Parameters

NAMES = ("identity", "line_buffer", "strided", "transposed", "rows_with_gaps")
# Cycles behind the last event, in which nothing may happen.
DRAIN = 64


def stream(name: str, parameters) -> Stream:
    """The `Stream` of an example at the top of a tile with `parameters` of `memories`. Raises `TilewrightError`."""
    family, _, text = name.partition("-")
    if family not in NAMES:
        raise UnknownNameError("stream", name, NAMES)
    module = registry.member(__name__, "stream", family, NAMES)
    stated = module.parse(text)
    if stated is None:
        raise ConfigError(f"stream {name!r}: expected {module.NAMING}")
    arrivals, reads = module.moves(*stated)
    if len(reads) > parameters.outputs:
        raise ConfigError(f"stream {name!r}: expected at most {parameters.outputs} outputs, found {len(reads)}")
    if len(arrivals) > 1 << parameters.bits:
        raise ConfigError(
            f"stream {name!r}: expected at most {1 << parameters.bits} words, which have {parameters.bits} bits, found "
            f"{len(arrivals)}"
        )
    return of_moves(arrivals, reads, parameters)


def of_moves(arrivals: np.ndarray, reads: list[tuple[np.ndarray, np.ndarray]], parameters: "Parameters") -> Stream:
    """The `Stream` at the top of a tile in which word n comes in at ``arrivals[n]``, and words go out as `reads`
    says."""
    cycles = int(max([arrivals.max(), *(at.max() for at, _ in reads if len(at))])) + 1 + DRAIN
    data_in = np.zeros((cycles, parameters.inputs, 1), dtype=np.int64)
    data_out = np.zeros((cycles, parameters.outputs, 1), dtype=np.int64)
    valid_in, valid_out = (np.zeros(x.shape[:2], dtype=bool) for x in (data_in, data_out))
    data_in[arrivals, 0, 0], valid_in[arrivals, 0] = np.arange(len(arrivals)), True
    for port, (at, words) in enumerate(reads):
        data_out[at, port, 0], valid_out[at, port] = words, True
    return Stream("top", data_in, valid_in, data_out, valid_out)


def raster(width, height, pitch=None, start=0):
    """int64 [height * width]: cycles of an image's words, a row every `pitch` cycles."""
    rows = np.arange(height)[:, None] * (pitch or width)
    return (start + rows + np.arange(width)).reshape(-1)


def sizes(text: str, count: int):
    """``[number, ..., width, height]`` of a text such as ``3-28x28``; None where it is not one of `count` numbers."""
    parts = text.replace("x", "-").split("-")
    return [int(part) for part in parts] if len(parts) == count and all(p.isdigit() and int(p) for p in parts) else None
