"""The published memory tile: aggregators, a wide memory with one port, transpose buffers. See the package."""

import numpy as np

from tilewright.pushmem.memories import ConflictError, Parameters, Run, _events

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


def run(fired, data_in, parameters=PARAMETERS, *, strict=True):
    """The `Run` of a tile. fired: `recurrence.fired`; data_in: int64 [cycles, inputs]. See the family's contract."""
    cycles, fetch = len(data_in), parameters.fetch
    lanes = np.arange(fetch)
    rows, rows_valid = np.zeros((cycles, parameters.inputs, fetch), np.int64), np.zeros((cycles, parameters.inputs), bool)
    writes, reads = [], []
    for port in range(parameters.inputs):
        at, where = fired[f"in2agg{port}"]
        asked, what = fired[f"agg2sram{port}"]
        words = what["agg_row"][:, None] * fetch + lanes
        found = _events.latest(at, where["agg"], np.broadcast_to(asked[:, None], words.shape), words)
        values = _events.taken(data_in[at, port], found)
        rows[asked, port], rows_valid[asked, port] = values, True
        writes.append((asked, np.full(len(asked), port), what["sram"], values, found >= 0))
    for port in range(parameters.outputs):
        at, what = fired[f"sram2tb{port}"]
        reads.append((at, np.full(len(at), parameters.inputs + port), what["sram"]))
    times, who, addresses = (np.concatenate([each[part] for each in (*writes, *reads)]) for part in range(3))
    won = _winners(times, who, parameters, strict)
    counts = [len(each[0]) for each in (*writes, *reads)]
    won = np.split(won, np.cumsum(counts)[:-1])
    written = [np.concatenate([part[w] for part, w in zip(column, won, strict=False)]) for column in zip(*writes, strict=True)]
    read = [np.concatenate([part[w] for part, w in zip(column, won[len(writes) :], strict=True)]) for column in zip(*reads, strict=True)]
    order = np.argsort(read[0])
    read_at, wanted = read[0][order], read[2][order]
    found = _events.latest(written[0], written[2], read_at, wanted)
    words, known = _events.taken(written[3], found), _events.taken(written[4], found)
    data_out = np.zeros((cycles, parameters.outputs), dtype=np.int64)
    valid_out, fetched = np.zeros_like(data_out, dtype=bool), np.zeros((cycles, parameters.outputs), dtype=bool)
    for port in range(parameters.outputs):
        at, what = fired[f"sram2tb{port}"]
        fetched[at, port] = True
        # The register as it is behind cycle t goes to the row at the end of t + 1.
        held = np.searchsorted(read_at, at, side="right") - 1
        asked, where = fired[f"tb2out{port}"]
        row, lane = np.divmod(where["tb"], fetch)
        found = _events.latest(at + 1, what["tb_row"], asked, row)
        found = np.where(found >= 0, _events.taken(held, found), -1)
        values = _events.taken(words, found)[np.arange(len(asked)), lane]
        if strict:
            defined = _events.taken(known, found)[np.arange(len(asked)), lane]
            _defined(asked, defined, f"tb2out{port}")
        data_out[asked, port], valid_out[asked, port] = values, True
    behind = np.searchsorted(read_at, np.arange(cycles)) - 1
    inside = {"rows": rows, "rows_valid": rows_valid, "register": _events.taken(words, behind), "fetched": fetched}
    return Run(data_out, valid_out, inside | {"known": behind >= 0})


def _winners(times, who, parameters, strict):
    """bool: which accesses of the memory's one port happen. Raises `ConflictError` where strict and two meet."""
    order = np.lexsort((who, times))
    met = np.flatnonzero(times[order][1:] == times[order][:-1])
    if strict and len(met):
        names = parameters.priority()
        one, other = (names[who[order[met[0] + step]]] for step in (0, 1))
        raise ConflictError(f"cycle {times[order[met[0]]]}: {one} and {other} meet at the one port of the memory")
    won = np.ones(len(times), dtype=bool)
    won[order[met + 1]] = False
    return won


def _defined(times, defined, name):
    if not defined.all():
        first = times[np.flatnonzero(~defined)[0]]
        raise ConflictError(f"cycle {first}: {name} reads a word that was never written")


def tile(parameters=PARAMETERS):
    """The RTL of a tile with these parameters."""
    from tilewright.pushmem.memories import _rtl

    return _rtl.wide_tile(parameters)
