"""The published memory tile: aggregators, a wide memory with one port, transpose buffers. See the package."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tilewright.pushmem.memories import ConflictError, Fired, Link, Parameters, Run, _events

if TYPE_CHECKING:
    from amaranth.hdl import Elaboratable

NAME = "pub"
PARAMETERS = Parameters(
    fetch=4,
    depth=512,
    inputs=2,
    outputs=2,
    kinds=(
        ("in2agg", "i", ("agg",)),
        ("agg2sram", "i", ("agg_row", "sram")),
        ("sram2tb", "o", ("sram", "tb_row")),
        ("tb2out", "o", ("tb",)),
    ),
)


def run(
    fired: Fired,
    data_in: np.ndarray,
    parameters: Parameters = PARAMETERS,
    *,
    strict: bool = True,
    link: Link | None = None,
) -> Run:
    """The `Run` of a tile. fired: `recurrence.fired`; data_in: int64 [cycles, inputs]. link: its place in a chain. See
    the family's contract."""
    own, mine = (fired, None) if link is None else link.owned(fired, parameters)
    rows, known = aggregated(own, data_in, parameters)
    register, whole = stored(own, rows, known, parameters, strict=strict)
    data_out, valid_out = buffered(fired, register, whole, parameters, strict=strict, link=link, mine=mine)
    fired = own
    inside = {"rows": rows, "rows_valid": fires(fired, "agg2sram", parameters.inputs, len(rows))}
    inside |= {
        "rows_known": known,
        "register": register,
        "fetched": fires(fired, "sram2tb", parameters.outputs, len(rows)),
    }
    return Run(data_out, valid_out, inside | {"known": whole})


def aggregated(fired: Fired, data_in: np.ndarray, parameters: Parameters = PARAMETERS) -> tuple[np.ndarray, np.ndarray]:
    """``(rows, known)``, int64 and bool [cycles, inputs, fetch]: what the memory is given, 0 where it is given nothing,
    and which words were ever written."""
    shape = len(data_in), parameters.inputs, parameters.fetch
    rows, known = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    for port in range(parameters.inputs):
        at, where = fired[f"in2agg{port}"]
        asked, what = fired[f"agg2sram{port}"]
        wanted = what["agg_row"][:, None] * parameters.fetch + np.arange(parameters.fetch)
        found = _events.latest(at, where["agg"], np.broadcast_to(asked[:, None], wanted.shape), wanted)
        rows[asked, port], known[asked, port] = _events.taken(data_in[at, port], found), found >= 0
    return rows, known


def stored(
    fired: Fired, rows: np.ndarray, known: np.ndarray, parameters: Parameters = PARAMETERS, *, strict: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """``(register, known)``, [cycles, fetch]: the memory's read register in each cycle, given the `aggregated` rows."""
    names = parameters.priority()
    times = np.concatenate([fired[name][0] for name in names])
    who = np.concatenate([np.full(len(fired[name][0]), number) for number, name in enumerate(names)])
    addresses = np.concatenate([fired[name][1]["sram"] for name in names])
    won = _winners(times, who, names, strict)
    times, who, addresses = times[won], who[won], addresses[won]
    writes = who < parameters.inputs
    at, port = times[writes], who[writes]
    order = np.argsort(times[~writes])
    read_at, wanted = times[~writes][order], addresses[~writes][order]
    found = _events.latest(at, addresses[writes], read_at, wanted)
    held = np.searchsorted(read_at, np.arange(len(rows))) - 1
    found = np.where(held >= 0, found[np.maximum(held, 0)], -1) if len(found) else held
    return _events.taken(rows[at, port], found), _events.taken(known[at, port], found)


def buffered(
    fired: Fired,
    register: np.ndarray,
    known: np.ndarray,
    parameters: Parameters = PARAMETERS,
    *,
    strict: bool = True,
    link: Link | None = None,
    mine: Mapping[str, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """``(data_out, valid_out)`` [cycles, outputs] of the transpose buffers, given the read register of each cycle.

    link: the place in a chain. mine: of each controller's fetches, those that this tile's memory answers."""
    cycles = len(register)
    data_out, valid_out = (
        np.zeros((cycles, parameters.outputs), dtype=np.int64),
        np.zeros((cycles, parameters.outputs), bool),
    )
    for port in range(parameters.outputs):
        at, what = fired[f"sram2tb{port}"]
        # The register as it is in the cycle after the fetch goes to the row at that cycle's end.
        at, filled = at[at + 1 < cycles] + 1, what["tb_row"][at + 1 < cycles]
        asked, where = fired[f"tb2out{port}"]
        row, lane = np.divmod(where["tb"], parameters.fetch)
        found, each = _events.latest(at, filled, asked, row), np.arange(len(asked))
        word, defined = _events.taken(register[at], found)[each, lane], _events.taken(known[at], found)[each, lane]
        if link is not None:
            own = _events.taken((mine or {})[f"sram2tb{port}"][: len(at)], found)
            word = np.where(own, word, 0 if link.data is None else link.data[asked, port])
            # What is another tile's is checked there.
            defined = defined | ~own if strict else defined
        if strict and not defined.all():
            first = asked[np.flatnonzero(~defined)[0]]
            raise ConflictError(f"cycle {first}: tb2out{port} reads a word that was never written")
        data_out[asked, port], valid_out[asked, port] = word, True
    return data_out, valid_out


def fires(fired: Fired, kind: str, ports: int, cycles: int) -> np.ndarray:
    """bool [cycles, ports]: when controllers of a kind fire."""
    found = np.zeros((cycles, ports), dtype=bool)
    for port in range(ports):
        found[fired[f"{kind}{port}"][0], port] = True
    return found


def _winners(times, who, names, strict):
    """bool: which accesses of the memory's one port happen. Raises `ConflictError` where strict and two meet."""
    order = np.lexsort((who, times))
    met = np.flatnonzero(times[order][1:] == times[order][:-1])
    if strict and len(met):
        one, other = (names[who[order[met[0] + step]]] for step in (0, 1))
        raise ConflictError(f"cycle {times[order[met[0]]]}: {one} and {other} use the memory's only port at once")
    won = np.ones(len(times), dtype=bool)
    won[order[met + 1]] = False
    return won


def tile(parameters: Parameters = PARAMETERS, part: str = "top") -> "Elaboratable":
    """The RTL of a tile with these parameters, or of a part of it, see `streams`."""
    from tilewright.pushmem.memories import _rtl

    return _rtl.wide_tile(parameters, part)
