"""Parts of a tile: their streams, their controllers, and how they run by themselves.

Inside of a part everything that fires is seen; what is not seen are places: of words in an aggregator, of wide words in
the memory, of rows in a transpose buffer. Tokens tell which write a read wants. Places are then given in the order of
the writes, as rings, and loops are fitted. A controller that two parts share is fitted for both at once (`joined`).
"""

from collections.abc import Sequence

import numpy as np

from tilewright.pushmem import fit
from tilewright.pushmem.counting import NoScheduleError, NotFoundError
from tilewright.pushmem.memories import Fired, Memory, Parameters, Run, pub
from tilewright.pushmem.settings import Affine, Configuration, Controller
from tilewright.pushmem.streams import ANY, DRAIN, Stream

# What stands for a word that was never written where words go in: the largest, which is taken for no token.
NO_TOKEN = (1 << 16) - 1
# An address that no row shows.
_UNSEEN = -1
# Parts, in the order of the data, and the controllers of each with the addresses that it tells.
ORDER = ("agg", "sram", "tb")
TOLD = {
    "agg": {"in2agg": ("agg",), "agg2sram": ("agg_row",)},
    "sram": {"agg2sram": ("sram",), "sram2tb": ("sram",)},
    "tb": {"sram2tb": ("tb_row",), "tb2out": ("tb",)},
}


def firings(stream: Stream, memory: Memory) -> dict[str, np.ndarray]:
    """Cycles in which each controller fires that the valid bits tell of."""
    kinds = [kind for kind, _, _ in memory.PARAMETERS.kinds]
    ends = tuple(TOLD[stream.part]) if stream.part != "top" else (kinds[0], kinds[-1])
    # Without a transpose buffer a word goes out a cycle after its controller fires.
    late = (0, int("tb2out0" not in memory.PARAMETERS.ports()))
    return {
        f"{kind}{port}": np.flatnonzero(valid[:, port]) - behind
        for kind, valid, behind in zip(ends, (stream.valid_in, stream.valid_out), late, strict=True)
        for port in range(valid.shape[1])
    }


def of_run(part: str, stream: Stream, run: Run) -> Stream:
    """The `Stream` of a part, of a `Run` of the whole tile with the inputs of `stream`."""
    inside = run.inside
    rows, rows_valid, fetched = inside["rows"], inside["rows_valid"], inside["fetched"]
    if part == "agg":
        rows = np.where(inside["rows_known"] | ~rows_valid[:, :, None], rows, ANY)
        return Stream(part, stream.data_in, stream.valid_in, rows, rows_valid)
    if part == "sram":
        register = np.where(inside["known"], inside["register"], ANY)[:, None]
        return Stream(part, np.where(inside["rows_known"], rows, NO_TOKEN), rows_valid, register, fetched)
    register = np.where(inside["known"], inside["register"], NO_TOKEN)[:, None]
    return Stream(part, register, fetched, run.data_out[:, :, None], run.valid_out)


def run(part: str, fired: Fired, stream: Stream, parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """``(data_out, valid_out)`` of a part whose controllers fire so, with the inputs of `stream`.

    Raises `ConflictError` as `memories` says.
    """
    if part == "agg":
        rows, _ = pub.aggregated(fired, stream.data_in[:, :, 0], parameters)
        return rows, pub.fires(fired, "agg2sram", parameters.inputs, len(stream))
    if part == "sram":
        register, known = pub.stored(fired, stream.data_in, np.ones_like(stream.data_in, bool), parameters)
        register = np.where(known, register, 0)
        return register[:, None], pub.fires(fired, "sram2tb", parameters.outputs, len(stream))
    register = stream.data_in[:, 0]
    data, valid = pub.buffered(fired, register, np.ones_like(register, dtype=bool), parameters)
    return data[:, :, None], valid


def configuration(stream: Stream, memory: Memory) -> Configuration:
    """Controllers of the part that `stream` is of; addresses that it does not tell are 0.

    Raises `NoScheduleError` where there are none, `NotFoundError` and `NotAffineError` where there may be others.
    """
    if stream.part == "tb" and (stream.data_out[stream.valid_out] == ANY).any():
        raise NotFoundError("undecided", "tb: expected known output words, which identify the writes, found x")
    found = {"agg": _agg, "sram": _sram, "tb": _tb}[stream.part](stream, memory.PARAMETERS)
    first: fit.NotAffineError | None = None
    for events in _ends(found):
        try:
            return Configuration(memory.NAME, _fitted(events, memory, len(stream) + DRAIN))
        except fit.NotAffineError as error:
            first = first or error
    assert first is not None, stream.part
    raise first


def _ends(events):
    """`events` with every address that is known; of a last one that no row shows, with each step that was seen."""
    for name, (at, told) in events.items():
        address = told.get("sram", at)
        if len(at) and address[-1] == _UNSEEN:
            steps = dict.fromkeys(np.diff(address[:-1])[::-1].tolist()) or (0,)
            before = address[-2] if len(at) > 1 else 0
            for step in steps:
                yield events | {name: (at, {"sram": np.append(address[:-1], before + step)})}
            return
    yield events


def joined(configurations: Sequence[Configuration], memory: Memory, cycles: int) -> Configuration:
    """One `Configuration` of those of the parts: a controller of two has the addresses of both, and loops for both.

    cycles: of the longer trace; of two traces of one controller, that of the one that fires longer decides when.
    """
    from tilewright.pushmem import recurrence

    events: dict = {}
    ports = memory.PARAMETERS.ports()
    for part, found in zip(ORDER, configurations, strict=True):
        for name, controller in found.controllers.items():
            times, addresses = recurrence.events(controller, ports[name], cycles)
            told = {address: addresses[address] for address in TOLD[part][ports[name].kind]}
            if name in events:
                shorter = min(len(times), len(events[name][0]))
                if (times[:shorter] != events[name][0][:shorter]).any():
                    raise NotFoundError("parts", f"{name}: expected one schedule, found two in two parts")
                told |= events[name][1]
                times = max(times, events[name][0], key=len)
                bits = ports[name].addresses
                told = {key: _continued(values, len(times), bits[key]) for key, values in told.items()}
            events[name] = times, told
    return Configuration(memory.NAME, _fitted(events, memory, cycles + DRAIN))


def _continued(values, count, bits):
    """Addresses of a trace that ends before the other one: it goes on by its last step."""
    step = values[-1] - values[-2] if len(values) > 1 else 0
    more = values[-1] + step * np.arange(1, count - len(values) + 1)
    return np.concatenate([values, more % (1 << bits)])


def _fitted(events, memory, until):
    ports, levels, found = memory.PARAMETERS.ports(), memory.PARAMETERS.levels, {}
    for name in ports:
        if name not in events or not len(events[name][0]):
            continue
        times, told = events[name]
        loops = fit.controller(times, told, ports[name].addresses, levels, until)
        silent = Affine(0, (0,) * len(loops.extents))
        addresses = {address: loops.addresses.get(address, silent) for address in ports[name].addresses}
        found[name] = Controller(loops.extents, loops.cycle, addresses)
    return found


def _agg(stream, parameters):
    """Events of the aggregators' controllers."""
    events, fetch = {}, parameters.fetch
    for port in range(parameters.inputs):
        came, given = np.flatnonzero(stream.valid_in[:, port]), np.flatnonzero(stream.valid_out[:, port])
        number = {token: at for at, token in enumerate(stream.data_in[came, port, 0].tolist())}
        rows: list = []
        places: dict = {}
        ring, news = 0, -1
        for cycle in given.tolist():
            # What stands there from the row before is not news.
            lanes = {
                number[token]: lane
                for lane, token in enumerate(stream.data_out[cycle, port].tolist())
                if token in number and came[number[token]] < cycle
            }
            fresh = [at for at in lanes if at not in places]
            if fresh:
                news += 1
                ring = news % parameters.rows
            elif lanes:
                ring = places[max(lanes)] // fetch
            rows.append(ring)
            places |= {at: ring * fetch + lanes[at] for at in fresh}
        addresses, last = [], -1
        for at in range(len(came)):
            last = places.get(at, (last + 1) % (parameters.rows * fetch))
            addresses.append(last)
        events[f"in2agg{port}"] = came, {"agg": np.array(addresses, dtype=np.int64)}
        events[f"agg2sram{port}"] = given, {"agg_row": np.array(rows, dtype=np.int64)}
    return events


def _sram(stream, parameters):
    """Events of the memory's controllers."""
    events: dict = {}
    written: dict = {}
    met = np.flatnonzero(stream.valid_in.sum(1) + stream.valid_out.sum(1) > 1)
    if len(met):
        raise NoScheduleError("memory port", f"cycle {met[0]}: two accesses of the memory, which has one a cycle")
    counts = stream.valid_in.sum(0)
    used = [int(count) for count in counts if count]
    step = 2 if len(used) > 1 and sum(used) > parameters.depth else 1
    base = 0
    accesses: list = []
    for port in range(parameters.inputs):
        at = np.flatnonzero(stream.valid_in[:, port])
        address = ((port if step == 2 else base) + step * np.arange(len(at))) % parameters.depth
        base += len(at)
        events[f"agg2sram{port}"] = at, {"sram": address}
        accesses += zip(at.tolist(), [0] * len(at), [port] * len(at), address.tolist(), strict=True)
    for port in range(parameters.outputs):
        at = np.flatnonzero(stream.valid_out[:, port])
        accesses += [(cycle, 1, port, None) for cycle in at.tolist()]
        events[f"sram2tb{port}"] = at, {"sram": np.zeros(len(at), dtype=np.int64)}
    place = dict.fromkeys(range(parameters.outputs), 0)
    for cycle, read, port, address in sorted(accesses, key=lambda each: each[:2]):
        if not read:
            key = tuple(stream.data_in[cycle, port].tolist())
            # The latest stands last.
            written.pop(key, None)
            written[key] = address
            continue
        number, place[port] = place[port], place[port] + 1
        if cycle + 1 >= len(stream):
            events[f"sram2tb{port}"][1]["sram"][number] = _UNSEEN
            continue
        shown = tuple(stream.data_out[cycle + 1, 0].tolist())
        wanted = _latest(written, shown)
        if wanted is None:
            text = f"cycle {cycle + 1}: the memory gives a wide word that was never written"
            # What was never written is 0 in the memory; what was written of words that are not known may be any.
            open_ = set(shown) <= {0, ANY} or any(ANY in key for key in written)
            raise (NotFoundError if open_ else NoScheduleError)("never written", text)
        events[f"sram2tb{port}"][1]["sram"][number] = written[wanted]
    return events


def _latest(written, wanted):
    """The last wide word that was written and is as wanted, None where there is none; some of its words may be any."""
    if ANY not in wanted:
        return wanted if wanted in written else None
    known = [(lane, word) for lane, word in enumerate(wanted) if word != ANY]
    if not known:
        raise NotFoundError("undecided", "sram: a wide word that is fetched may be any")
    return next((key for key in reversed(written) if all(key[lane] == word for lane, word in known)), None)


def _tb(stream, parameters):
    """Events of the transpose buffers' controllers."""
    events, fetch = {}, parameters.fetch
    for port in range(parameters.outputs):
        at, out = np.flatnonzero(stream.valid_in[:, port]), np.flatnonzero(stream.valid_out[:, port])
        at = at[at + 1 < len(stream)]
        rows = np.arange(len(at)) % parameters.tb_rows
        there, places, done = {}, [], 0
        for cycle in out.tolist():
            while done < len(at) and at[done] + 2 <= cycle:
                for lane, token in enumerate(stream.data_in[at[done] + 1, 0].tolist()):
                    there[token] = rows[done] * fetch + lane
                done += 1
            token = int(stream.data_out[cycle, port, 0])
            if token not in there:
                text = f"cycle {cycle}: output {port} gives {token}, never fetched before"
                raise (NotFoundError if ANY in there else NoScheduleError)("never written", text)
            places.append(there[token])
        events[f"sram2tb{port}"] = at, {"tb_row": rows}
        events[f"tb2out{port}"] = out, {"tb": np.array(places, dtype=np.int64)}
    return events
