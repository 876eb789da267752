"""A tile's controllers from what enters and leaves it: the schedules inside are chosen here.

Bounds of each access of the memory follow from the stream (`Bounds`). A wide word is written once its last word is
there, and before the aggregator's row is filled anew. A *run* is what an output reads of one wide word without a break;
it is fetched after the write, two cycles before its first word, and not before the transpose buffer's row is free.
Schedules are *templates*: the loops of the port, strip-mined by the words of a wide word, with other steps of the
innermost loop besides. Where runs have no loops, each round of the port's innermost loop fetches as many wide words as
the transpose buffer holds, needed or not. Of all that keep within their bounds and never meet at the memory's one port,
the first ones that delay least are taken, and their loops fitted.
"""

import contextlib
import itertools
from dataclasses import dataclass

import numpy as np

from tilewright.pushmem import counting, fit
from tilewright.pushmem.counting import NoScheduleError, UndecidedError
from tilewright.pushmem.settings import CYCLE_BITS, Configuration
from tilewright.pushmem.streams import ANY

# What bounds come from, by the names that explanations use.
AGGREGATOR, BUFFER, PORT, REUSE = "aggregator", "transpose buffer", "memory port", "memory words"
GROUPS = (AGGREGATOR, BUFFER, PORT, REUSE)
# Combinations of templates and starts that are tried, and starts of a template.
TRIES, STARTS = 20_000, 96
# Cycles by which accesses of one round may be further apart than the words that they move.
SLOWER = 4
_NEVER = 1 << 40


@dataclass
class Words:
    """Where words are. ports: for each input its arrivals. port, index: of each token that came in."""

    arrivals: list[np.ndarray]
    tokens: list[np.ndarray]
    reads: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass
class Side:
    """Accesses of the memory by one controller, in order. earliest, latest: their bounds, int64 [n], without those that
    follow from other sides. first: what templates start from, int64 [n]. addresses: ``{name: [n]}``. wide: numbers of
    the wide words, int64 [n]; of a fetch that nobody needs, any. needed: bool [n], or None for all. ring: how many wide
    words on the same place is written again. rounds: of the port's loops, see `_rounds`. source: of reads, the place
    among the sides of what writes."""

    name: str
    earliest: np.ndarray
    latest: np.ndarray
    first: np.ndarray
    addresses: dict[str, np.ndarray]
    wide: np.ndarray
    ring: int
    rounds: list[tuple[int, np.ndarray]]
    source: int | None = None
    needed: np.ndarray | None = None


def words(stream) -> Words:
    """What moves: tokens that come in, and for each output ``(cycles, inputs, numbers of words)``. Raises
    `NoScheduleError` for tokens that come in twice, never, or after they go out."""
    place, arrivals, tokens = {}, [], []
    for port in range(stream.valid_in.shape[1]):
        at = np.flatnonzero(stream.valid_in[:, port])
        arrivals.append(at)
        tokens.append(stream.data_in[at, port, 0])
        for number, token in enumerate(tokens[-1].tolist()):
            if token in place:
                raise NoScheduleError(
                    "tokens", f"cycle {at[number]}: expected a number for each word that comes in, found {token} again"
                )
            place[token] = port, number
    reads = []
    for port in range(stream.valid_out.shape[1]):
        at = np.flatnonzero(stream.valid_out[:, port])
        found = []
        for cycle, token in zip(at.tolist(), stream.data_out[at, port, 0].tolist(), strict=True):
            if token == ANY:
                raise UndecidedError(
                    f"cycle {cycle}: output {port} gives any word; its token decides the schedules inside"
                )
            if token not in place:
                raise NoScheduleError(
                    "never written", f"cycle {cycle}: output {port} gives {token}, which never came in"
                )
            found.append(place[token])
            if arrivals[found[-1][0]][found[-1][1]] >= cycle:
                came = arrivals[found[-1][0]][found[-1][1]]
                raise NoScheduleError(
                    "output before input", f"cycle {cycle}: output {port} gives {token}, which comes in at cycle {came}"
                )
        pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
        reads.append((at, pairs[:, 0], pairs[:, 1]))
    return Words(arrivals, tokens, reads)


def configuration(stream, memory) -> Configuration:
    """A `Configuration` whose tile gives `stream`. Raises `NoScheduleError`, whose cause was checked by leaving it
    out."""
    found = words(stream)
    errors = []
    for rows in itertools.product(*_row_lengths(found, memory.PARAMETERS)):
        try:
            return _solved(found, memory, rows, GROUPS)
        except (NoScheduleError, fit.NotAffineError) as error:
            errors.append((rows, error))
    # What comes closest says most: all loops were found, then bounds, then loops that were not.
    rows, error = min(
        errors, key=lambda each: (isinstance(each[1], fit.NotAffineError), getattr(each[1], "cause", 0) is not None)
    )
    if isinstance(error, fit.NotAffineError):
        raise NoScheduleError("not affine", str(error)) from error
    raise error if error.cause is not None else _explained(found, memory, rows, error)


def _explained(found, memory, rows, error):
    """The group of bounds without which there is a schedule: that one is the cause."""
    for group in GROUPS:
        kept = tuple(each for each in GROUPS if each != group)
        try:
            _solved(found, memory, rows, kept)
        except (NoScheduleError, fit.NotAffineError):
            continue
        return NoScheduleError(group, f"{error}; without the bounds of the {group} there is one")
    return NoScheduleError("bounds", f"{error}; leaving out one kind of bounds does not help")


def _row_lengths(found, parameters):
    """For each input lengths of rows that wide words may be aligned to: None, in which they follow on each other, comes
    first; then steps of the loops in which words go out; then one or two wide words but for one word, where all that
    comes in and goes out is made of such rows."""
    lengths = [[None] for _ in found.arrivals]
    for at, ports, numbers in found.reads:
        if len(at) and len(set(ports.tolist())) == 1:
            try:
                loops = fit.controller(at, {"word": numbers}, {"word": 40}, parameters.levels + 2)
            except fit.NotAffineError:
                continue
            whole = len(found.arrivals[ports[0]]), loops.extents[0] if loops.extents else 1
            short = (2 * parameters.fetch - 1, parameters.fetch - 1)
            strides = loops.addresses["word"].strides
            lengths[ports[0]] += [s for s in strides if parameters.fetch < s < 1 << CYCLE_BITS and s % parameters.fetch]
            lengths[ports[0]] += [row for row in short if row > 1 and not any(count % row for count in whole)]
    return [list(dict.fromkeys(each)) for each in lengths]


def _solved(found, memory, rows, groups):
    parameters = memory.PARAMETERS
    if "agg2sram0" not in parameters.ports():
        return _single(found, memory)
    writes, controllers, readings = _sides(found, memory, rows, groups)
    ports, first = parameters.ports(), None
    for taken in itertools.product(*readings):
        sides = [*writes, *(side for side, _ in taken)]
        if groups == GROUPS and all(side.needed is None for side in sides):
            counting.check(sides, parameters.depth)
        try:
            times = _chosen(sides, groups, lambda side: templates(side, ports[side.name].addresses, parameters.levels))
        except NoScheduleError as error:
            first = first or error
            continue
        made = controllers | {f"tb2out{side.name[-1]}": controller for side, controller in taken}
        for side, at in zip(sides, times, strict=True):
            made[side.name] = fit.controller(at, side.addresses, ports[side.name].addresses, parameters.levels)
        return Configuration(memory.NAME, {name: made[name] for name in ports if name in made})
    raise first


def _single(found, memory):
    """A tile without aggregators: words have addresses of their own, or those that are free again."""
    ports, depth = memory.PARAMETERS.ports(), memory.PARAMETERS.depth
    at, asked = found.arrivals[0], found.reads[0]
    controllers = {}
    if len(at):
        controllers["in2sram0"] = fit.controller(
            at, {"sram": np.arange(len(at)) % depth}, ports["in2sram0"].addresses, memory.PARAMETERS.levels
        )
    if len(asked[0]):
        controllers["sram2out0"] = fit.controller(
            asked[0] - 1, {"sram": asked[2] % depth}, ports["sram2out0"].addresses, memory.PARAMETERS.levels
        )
        reused = asked[2] + depth
        late = np.flatnonzero((reused < len(at)) & (at[np.minimum(reused, len(at) - 1)] < asked[0] - 1))
        if len(late):
            raise NoScheduleError(REUSE, f"cycle {asked[0][late[0]]}: the word that goes out was overwritten by then")
        early = np.flatnonzero(at[asked[2]] >= asked[0] - 1)
        if len(early):
            raise NoScheduleError("latency", f"cycle {asked[0][early[0]]}: expected two cycles from input to output")
    return Configuration(memory.NAME, controllers)


def _sides(found, memory, rows, groups):
    """``(writes, controllers, readings)``: sides that write, the controllers of the tile's inputs, and for each output
    ways to read: ``(side, the output's controller)``. Raises `fit.NotAffineError` for an output that has none."""
    parameters, ports = memory.PARAMETERS, memory.PARAMETERS.ports()
    fetch, ring, levels = parameters.fetch, parameters.rows * parameters.fetch, parameters.levels
    sides, controllers, numbers, source = [], {}, [], {}
    lengths = zip(found.arrivals, rows, strict=True)
    counts = [-(-int(_padded(np.array([len(at)]), row, fetch)[0]) // fetch) if len(at) else 0 for at, row in lengths]
    bases, step = _allotted(counts, parameters)
    for port, at in enumerate(found.arrivals):
        place = _padded(np.arange(len(at)), rows[port], fetch)
        numbers.append(place)
        if not len(at):
            continue
        name, given = f"in2agg{port}", f"agg2sram{port}"
        controllers[name] = fit.controller(at, {"agg": place % ring}, ports[name].addresses, levels)
        group = place // fetch
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        first, last = at[begins], at[np.append(begins[1:], len(at)) - 1]
        count = len(begins)
        latest = np.full(count, _NEVER)
        if AGGREGATOR in groups and count > parameters.rows:
            latest[: -parameters.rows] = first[parameters.rows :]
        order = np.arange(count)
        address = (bases[port] + step * order) % parameters.depth
        addresses = {"agg_row": order % parameters.rows, "sram": address}
        rounds = _rounds(controllers[name], at)
        source[port] = len(sides)
        sides.append(Side(given, last + 1, latest, first + fetch, addresses, order, parameters.depth // step, rounds))
    readings = []
    for port, (at, inputs, asked) in enumerate(found.reads):
        if not len(at):
            continue
        if len(set(inputs.tolist())) > 1:
            raise NoScheduleError("two inputs", f"output {port} gives words of both inputs; one controller follows one")
        came = inputs[0]
        base, per = bases[came], (step, parameters.depth)
        ways, first = [], None
        for way in (_by_runs, _by_rounds):
            try:
                ways += way(port, at, numbers[came][asked], parameters, groups)
            except fit.NotAffineError as error:
                first = first or error
        if not ways:
            raise first
        for side, _ in ways:
            side.ring, side.source = parameters.depth // step, source[came]
            side.addresses["sram"] = (base + per[0] * side.wide) % per[1]
        readings.append(ways)
    return sides, controllers, readings


def _by_runs(port, at, place, parameters, groups):
    """An output whose every run of reads of one wide word has a fetch. place: of each word, int64 [n]."""
    fetch, rows = parameters.fetch, parameters.tb_rows
    group, lane = np.divmod(place, fetch)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    run = np.cumsum(np.diff(group, prepend=-1) != 0) - 1
    controller = _output(port, at, (run % rows) * fetch + lane, parameters)
    first, last = at[begins], at[np.append(begins[1:], len(at)) - 1]
    earliest = np.zeros(len(begins), dtype=np.int64)
    behind = len(begins) - rows
    if BUFFER in groups and behind > 0:
        earliest[rows:] = last[:behind] - 1
    addresses = {"sram": None, "tb_row": np.arange(len(begins)) % rows}
    rounds = _rounds(controller, at)
    return [(Side(f"sram2tb{port}", earliest, first - 2, first - 2, addresses, group[begins], 0, rounds), controller)]


def _by_rounds(port, at, place, parameters, groups):
    """An output whose innermost loop has, each time, a fetch for every row of the transpose buffer."""
    fetch, rows = parameters.fetch, parameters.tb_rows
    loops = fit.controller(at, {"word": place}, {"word": 40}, parameters.levels + 2)
    size = loops.extents[0] if loops.extents else 1
    if size == 1 or len(at) == size:
        return []
    times, places = at.reshape(-1, size), place.reshape(-1, size)
    wide = places[:, :1] // fetch + np.arange(rows)
    held = places - wide[:, :1] * fetch
    if held.min() < 0 or held.max() >= rows * fetch:
        return []
    controller = _output(port, at, held.reshape(-1), parameters)
    asks = held[:, :, None] // fetch == np.arange(rows)
    begins = times[:, 0]
    # What comes in for nobody may stay for ever, but not go before what was there is used.
    latest = np.where(asks, times[:, :, None], _NEVER).min(1) - 2
    used = np.maximum.accumulate(np.where(asks, times[:, :, None], -_NEVER).max(1))
    earliest = np.zeros_like(latest)
    if BUFFER in groups:
        earliest[1:] = np.maximum(0, used[:-1] - 1)
    addresses = {"sram": None, "tb_row": np.tile(np.arange(rows), len(times))}
    first = (begins[:, None] + np.arange(rows)).reshape(-1)
    side = Side(
        *(f"sram2tb{port}", earliest.reshape(-1), latest.reshape(-1), first, addresses, wide.reshape(-1), 0),
        [(len(times), begins), *_rounds(controller, at)],
        needed=asks.any(1).reshape(-1),
    )
    return [(side, controller)]


def _output(port, at, buffer, parameters):
    """The controller of an output that reads these places of the transpose buffer."""
    name = f"tb2out{port}"
    return fit.controller(at, {"tb": buffer}, parameters.ports()[name].addresses, parameters.levels)


def _padded(numbers, row, fetch):
    """Places of words in rows of `row` words that begin with a wide word; None: one word follows on the other."""
    return numbers if row is None else numbers // row * (-(-row // fetch) * fetch) + numbers % row


def _allotted(counts, parameters):
    """``(first wide word of each input, step)`` of rings in the memory: it wraps by itself."""
    used = [count for count in counts if count]
    if len(used) < 2 or sum(used) <= parameters.depth:
        return np.concatenate(([0], np.cumsum(counts)))[:-1].tolist(), 1
    return list(range(len(counts))), 2


def _rounds(controller, at):
    """``[(rounds, cycles at which each begins)]``: the port's loops, cut between an inner and an outer part."""
    inner = list(itertools.accumulate(controller.extents, lambda one, other: one * other))
    return [(len(at) // size, at[::size]) for size in inner]


def templates(side, widths, levels):
    """Yield cycles, int64 [n], the first 0: what a side's schedule may be, with loops that its addresses have as
    well."""
    seen = set()
    for shape in _shapes(side):
        key = shape.tobytes()
        if key in seen or (np.diff(shape) <= 0).any():
            continue
        seen.add(key)
        with contextlib.suppress(fit.NotAffineError):
            fit.controller(shape, side.addresses, widths, levels)
            yield shape


def _shapes(side):
    """Cycles as the stream has them; then the port's loops, cut between an inner and an outer part, with every step of
    what an inner part needs."""
    count = len(side.first)
    yield side.first - side.first[0]
    for rounds, begins in side.rounds:
        if count % rounds:
            continue
        each = count // rounds
        span = int(begins[1] - begins[0]) if rounds > 1 else int(side.first[-1] - side.first[0]) + 1
        # The last round may take its time.
        most = span // each + 1 + (SLOWER if rounds == 1 else 0)
        for step in range(most, 0, -1):
            yield ((begins - begins[0])[:, None] + step * np.arange(each)).reshape(-1)


def _chosen(sides, groups, shapes):
    """Cycles of each side, int64 [n] each, that delay least. Raises `NoScheduleError` without a cause."""
    tries, stuck, known = itertools.count(), {}, {}
    shapes = {id(side): list(shapes(side)) for side in sides}

    def options(number, taken):
        """``(cycles, the set of them)`` of a side, given those before it; the least delay first."""
        # They follow from what the side reads alone.
        source = sides[number].source
        key = number, None if source is None else taken[source].tobytes()
        if key not in known:
            known[key] = [(each, set(each.tolist())) for each in within(sides[number], taken)]
        return known[key]

    def within(side, taken):
        earliest, latest = side.earliest, side.latest
        if side.source is not None:
            written, some = taken[side.source], slice(None) if side.needed is None else side.needed
            wide, earliest, latest = side.wide[some], earliest.copy(), latest.copy()
            earliest[some] = np.maximum(earliest[some], written[wide] + 1)
            again = wide + side.ring
            if REUSE in groups:
                until = written[np.minimum(again, len(written) - 1)] - 1
                latest[some] = np.where(again < len(written), np.minimum(latest[some], until), latest[some])
        found = []
        for shape in shapes[id(side)]:
            low, high = max(0, int((earliest - shape).max())), int((latest - shape).min())
            found += [shape + start for start in range(low, min(high, low + STARTS) + 1)]
        if not found:
            stuck.setdefault(side.name, None)
        return sorted(found, key=lambda cycles: int((cycles - earliest).sum()))

    def search(number, taken, occupied):
        if number == len(sides):
            return taken
        for cycles, mine in options(number, taken):
            if next(tries) >= TRIES:
                return None
            if PORT not in groups or occupied.isdisjoint(mine):
                found = search(number + 1, [*taken, cycles], occupied | mine)
                if found is not None:
                    return found
        return None

    found = search(0, [], set())
    if found is None:
        where = f", {next(iter(stuck))} none that keeps within its bounds" if stuck else ""
        raise NoScheduleError(None, f"no affine schedules of the memory's accesses fit together{where}")
    return found
