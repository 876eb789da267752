"""A memory with a write port and a read port, a word wide: no aggregator and no transpose buffer.

``in2sram0`` writes ``data_in[0]`` at the end of its cycle. ``sram2out0`` reads the word as of its cycle t; it is
``data_out[0]``, and valid, in t + 1.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.pushmem.memories import ConflictError, Fired, Link, Parameters, Run, _events

if TYPE_CHECKING:
    from amaranth.hdl import Elaboratable

NAME = "dp"
PARAMETERS = Parameters(
    fetch=1,
    depth=2048,
    inputs=1,
    outputs=1,
    kinds=(("in2sram", "i", ("sram",)), ("sram2out", "o", ("sram",))),
)


def run(
    fired: Fired,
    data_in: np.ndarray,
    parameters: Parameters = PARAMETERS,
    *,
    strict: bool = True,
    link: Link | None = None,
) -> Run:
    """The `Run` of a tile. fired: `recurrence.fired`; data_in: int64 [cycles, 1]. link: its place in a chain. See the
    family's contract."""
    every = fired["sram2out0"][0]
    mine: Any
    own, mine = (fired, None) if link is None else link.owned(fired, parameters)
    (at, where), (asked, what) = own["in2sram0"], own["sram2out0"]
    found = _events.latest(at, where["sram"], asked, what["sram"])
    if strict and (found < 0).any():
        first = asked[np.flatnonzero(found < 0)[0]]
        raise ConflictError(f"cycle {first}: sram2out0 reads a word that was never written")
    data_out = np.zeros((len(data_in) + 1, 1), dtype=np.int64)
    valid_out = np.zeros_like(data_out, dtype=bool)
    if link is not None and link.data is not None:
        passed = every[~mine["sram2out0"]]
        passed = passed[passed + 1 < len(data_in)]
        data_out[passed + 1, 0] = link.data[passed + 1, 0]
    data_out[asked + 1, 0], valid_out[every + 1, 0] = _events.taken(data_in[at, 0], found), True
    return Run(data_out[:-1], valid_out[:-1])


def tile(parameters: Parameters = PARAMETERS) -> "Elaboratable":
    """The RTL of a tile with these parameters."""
    from tilewright.pushmem.memories import _rtl

    return _rtl.dual_port_tile(parameters)
