"""A tile's controllers from what enters and leaves it: the schedules inside are chosen here.

Words that come in get places in wide words by a *layout* (`Layout`). Bounds of each access of the memory follow: a wide
word is written once its last word is there, and before the aggregator's row is filled anew. A *run* is what an output
reads of one wide word without a break; it is fetched after the write, two cycles before its first word, and not before
the transpose buffer's row is free.
Schedules are *templates*: the loops of the port, strip-mined by the words of a wide word, with other steps of the
innermost loop besides. Where runs have no loops, each round of the port's innermost loop fetches as many wide words as
the transpose buffer holds, needed or not. Of all that keep within their bounds and never meet at the memory's one port,
the first ones that delay least are taken, and their loops fitted.

Where no layout has such schedules nothing is known: `counting.impossible` says what no configuration gives.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from operator import length_hint
from time import perf_counter
from typing import NamedTuple

import numpy as np

from tilewright.pushmem import counting, fit
from tilewright.pushmem.counting import NoScheduleError, NotFoundError, Side, Words
from tilewright.pushmem.memories import Memory
from tilewright.pushmem.settings import CYCLE_BITS, Configuration
from tilewright.pushmem.streams import ANY, Stream

# What bounds come from, by the names that explanations use.
AGGREGATOR, BUFFER, PORT, REUSE = "aggregator", "transpose buffer", "memory port", "memory words"
GROUPS = (AGGREGATOR, BUFFER, PORT, REUSE)
# Combinations of templates and starts that are tried, and starts of a template.
TRIES, STARTS = 20_000, 96
# Fetches of a round, at most.
MOST = 32
# Cycles by which accesses of one round may be further apart than the words that they move.
SLOWER = 4
_NEVER = 1 << 40


class Layout(NamedTuple):
    """Places of the words of an input. row: words of a row that begins with a wide word; None: one follows on the
    other. shift: places that are left out before the first. kept: what is written, ``all``; ``wide``, wide words of
    which a word goes out; ``words``, in which those that do not go out take the place of the next that does. shared:
    whether the words of all inputs have the same places in the memory."""

    row: int | None = None
    shift: int = 0
    kept: str = "all"
    shared: bool = False


def words(stream: Stream) -> Words:
    """What moves. Raises `NoScheduleError` for words that go out and never came in, or not before; `NotFoundError` for
    a token that comes in twice."""
    place: dict = {}
    arrivals: list = []
    twice = None
    for port in range(stream.valid_in.shape[1]):
        at = np.flatnonzero(stream.valid_in[:, port])
        arrivals.append(at)
        for number, token in enumerate(stream.data_in[at, port, 0].tolist()):
            if token in place:
                twice = twice or (
                    f"cycle {at[number]}: expected a number for each word that comes in, found {token} again"
                )
            if token not in place or at[number] < arrivals[place[token][0]][place[token][1]]:
                place[token] = port, number
    reads, free = [], None
    for port in range(stream.valid_out.shape[1]):
        at, found = np.flatnonzero(stream.valid_out[:, port]), []
        known = stream.data_out[at, port, 0] != ANY
        if not known.all():
            free = (
                free or f"cycle {at[~known][0]}: output {port} gives any word; its token decides the schedules inside"
            )
        at = at[known]
        for cycle, token in zip(at.tolist(), stream.data_out[at, port, 0].tolist(), strict=True):
            if token not in place:
                raise NoScheduleError(
                    "never written", f"cycle {cycle}: output {port} gives {token}, which never came in"
                )
            found.append(place[token])
            came = arrivals[found[-1][0]][found[-1][1]]
            if came >= cycle:
                raise NoScheduleError(
                    "output before input", f"cycle {cycle}: output {port} gives {token}, which comes in at cycle {came}"
                )
        pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
        reads.append((at, pairs[:, 0], pairs[:, 1]))
    if twice is not None:
        raise NotFoundError("tokens", twice)
    return Words(arrivals, reads, free)


class _Tries:
    """An iterator that ends after so many tries, or when the time is over."""

    def __init__(self, end):
        self.left, self.end = TRIES, end

    def __next__(self):
        self.left -= 1
        if not length_hint(self):
            raise StopIteration
        return self.left

    def __length_hint__(self):
        return 0 if perf_counter() > self.end else max(0, self.left)


def configuration(stream: Stream, memory: Memory, end: float = math.inf) -> Configuration:
    """A `Configuration` whose tile gives `stream`. Raises `NoScheduleError` where there is none, and `NotFoundError`,
    whose cause was checked by leaving it out, where no layout has one by the time `end`."""
    found = words(stream)
    counting.impossible(found, memory.PARAMETERS)
    if found.free is not None:
        raise NotFoundError("undecided", found.free)
    errors, usual = list[tuple](), list(itertools.product(*_usual(found, memory.PARAMETERS)))
    plain = len(usual)
    usual += [tuple(each._replace(shared=True) for each in layouts) for layouts in usual if len(layouts) > 1]
    tried = ((layouts, _Tries(end)) for layouts in usual)
    for layouts, tries in itertools.chain(tried, _others(found, usual, memory.PARAMETERS, end)):
        if errors and not length_hint(tries):
            break
        try:
            return _solved(found, memory, layouts, GROUPS, tries)
        except (NotFoundError, fit.NotAffineError) as error:
            errors.append((layouts, error))
    # What comes closest says most: all loops were found, then bounds, then loops that were not.
    layouts, closest = min(
        errors[:plain],
        key=lambda each: (isinstance(each[1], fit.NotAffineError), getattr(each[1], "cause", 0) is not None),
    )
    if isinstance(closest, fit.NotAffineError):
        raise NotFoundError("not affine", str(closest)) from closest
    raise closest if closest.cause is not None else _explained(found, memory, layouts, closest, end)


def _usual(found, parameters):
    """For each input layouts in which all words are written, and wide words full but at the ends of rows."""
    return [[Layout(row) for row in rows] for rows in _row_lengths(found, parameters)]


def _others(found, usual, parameters, end):
    """Yield ``(a layout for each input, tries)`` beyond the `usual` ones: those that leave more of wide words empty, or
    words out. They share their tries. All inputs have one, or one of them has."""
    tries, ports = _Tries(end), range(len(found.arrivals))
    others, seen = [_of_input(found, port, parameters) for port in ports], set(usual)
    for each in dict.fromkeys(itertools.chain(*others)):
        for changed in (ports, *([port] for port in ports)):
            layouts = tuple(each if port in changed and each in others[port] else usual[0][port] for port in ports)
            if layouts not in seen:
                if not length_hint(tries):
                    return
                seen.add(layouts)
                yield layouts, tries


def _of_input(found, port, parameters):
    """Layouts of an input but for those in which one full wide word follows on the other."""
    at, fetch = found.arrivals[port], parameters.fetch
    if not len(at):
        return []
    rows = dict.fromkeys([*range(fetch - 1, 0, -1), *(row for row in _bursts(at, parameters) if row % fetch)])
    made = [Layout(), *(Layout(row) for row in rows), *(Layout(None, shift) for shift in range(1, fetch))]
    if not found.wanted(port).all():
        made += [each._replace(kept=kept) for kept in ("words", "wide") for each in made]
    return made[1:]


def _bursts(at, parameters):
    """Words of the rounds in which they come in."""
    try:
        loops = fit.controller(at, {}, {}, parameters.levels)
    except fit.NotAffineError:
        return []
    return list(itertools.accumulate(loops.extents, lambda one, other: one * other))[:-1]


def _explained(found, memory, layouts, error, end):
    """The group of bounds without which there is a schedule: that one is the cause."""
    for group in GROUPS:
        if perf_counter() > end:
            return NotFoundError("time", f"{error}; the time for its cause is over")
        kept = tuple(each for each in GROUPS if each != group)
        try:
            _solved(found, memory, layouts, kept, _Tries(end))
        except (NotFoundError, fit.NotAffineError):
            continue
        return NotFoundError(group, f"{error}; without the bounds of the {group} there is one")
    return NotFoundError("bounds", f"{error}; leaving out one kind of bounds does not help")


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


def _solved(found, memory, layouts, groups, tries):
    parameters = memory.PARAMETERS
    if "agg2sram0" not in parameters.ports():
        return _single(found, memory, layouts[0])
    writes, controllers, readings = _sides(found, memory, layouts, groups)
    ports = parameters.ports()
    first: NotFoundError | None = None
    for taken in itertools.product(*readings):
        sides = [*writes, *(side for side, _ in taken)]
        if groups == GROUPS and writes and all(side.needed is None for side in sides):
            counting.check(sides)
        try:
            times = _chosen(
                sides, groups, lambda side: templates(side, ports[side.name].addresses, parameters.levels), tries
            )
        except NotFoundError as error:
            first = first or error
            continue
        made = controllers | {f"tb2out{side.name[-1]}": controller for side, controller in taken}
        for side, at in zip(sides, times, strict=True):
            made[side.name] = fit.controller(at, side.addresses, ports[side.name].addresses, parameters.levels)
        return Configuration(memory.NAME, {name: made[name] for name in ports if name in made})
    assert first is not None, memory.NAME
    raise first


def _single(found, memory, layout):
    """A tile without aggregators: words have addresses of their own, or those that are free again."""
    ports, depth, levels = memory.PARAMETERS.ports(), memory.PARAMETERS.depth, memory.PARAMETERS.levels
    at, (asked, _, numbers) = found.arrivals[0], found.reads[0]
    wanted, controllers = found.wanted(0), {}
    place = np.cumsum(wanted) - wanted if layout.kept == "words" else np.arange(len(at))
    if len(at):
        controllers["in2sram0"] = fit.controller(at, {"sram": place % depth}, ports["in2sram0"].addresses, levels)
    if len(asked):
        controllers["sram2out0"] = fit.controller(
            asked - 1, {"sram": place[numbers] % depth}, ports["sram2out0"].addresses, levels
        )
        # The first word that comes to the same place later.
        again = np.searchsorted(place, place[numbers] + depth)
        late = np.flatnonzero((again < len(at)) & (at[np.minimum(again, len(at) - 1)] < asked - 1))
        if len(late):
            raise NotFoundError(REUSE, f"cycle {asked[late[0]]}: the word that goes out was overwritten by then")
    return Configuration(memory.NAME, controllers)


def _sides(found, memory, layouts, groups):
    """``(writes, controllers, readings)``: sides that write, the controllers of the tile's inputs, and for each output
    ways to read: ``(side, the output's controller)``. Raises `fit.NotAffineError` for an output that has none."""
    parameters, ports = memory.PARAMETERS, memory.PARAMETERS.ports()
    fetch, depth = parameters.fetch, parameters.depth
    placed = [
        _placed(at, found.wanted(port), layout, fetch)
        for port, (at, layout) in enumerate(zip(found.arrivals, layouts, strict=True))
    ]
    counts = [len(kept) for _, kept, _ in placed]
    (bases, step), around = _allotted(counts, parameters), depth
    if layouts[0].shared:
        around = min((count for count in counts if count), default=1)
        if around > depth or any(count % around for count in counts) or sum(count > 0 for count in counts) < 2:
            raise NotFoundError("places", "the inputs have no places in common")
        bases, step = [0] * len(counts), 1
    sides, controllers, numbers, behind = [], {}, [], 0
    for port, (at, (place, kept, last)) in enumerate(zip(found.arrivals, placed, strict=True)):
        numbers.append((behind + np.searchsorted(kept, place // fetch)) * fetch + place % fetch)
        if len(at):
            name, ring = f"in2agg{port}", parameters.rows * fetch
            controllers[name] = fit.controller(at, {"agg": place % ring}, ports[name].addresses, parameters.levels)
        if not len(kept):
            continue
        begins = at[np.flatnonzero(np.diff(place // fetch, prepend=-1))]
        latest, again = np.full(len(kept), _NEVER), kept + parameters.rows
        if AGGREGATOR in groups:
            latest[again < len(begins)] = begins[again[again < len(begins)]]
        address = (bases[port] + step * np.arange(len(kept))) % around
        addresses = {"agg_row": kept % parameters.rows, "sram": address}
        wide, first = behind + np.arange(len(kept)), begins[kept] + fetch
        rounds = _rounds(controllers[name], at)
        sides.append(Side(f"agg2sram{port}", last + 1, latest, first, addresses, wide, around // step, rounds))
        behind += len(kept)
    return sides, controllers, _readings(found, numbers, sides, step, parameters, groups)


def _placed(at, wanted, layout, fetch):
    """``(places of the words that come in, numbers of the wide words that are written, cycles of their last
    words)``."""
    number = np.cumsum(wanted) - wanted if layout.kept == "words" else np.arange(len(at))
    place = _padded(number, layout.row, fetch) + layout.shift
    counted = np.ones(len(at), dtype=bool) if layout.kept == "all" else wanted
    # Of the words that count, the last one of each wide word.
    kept, last = np.unique((place // fetch)[counted][::-1], return_index=True)
    return place, kept, at[counted][::-1][last]


def _readings(found, numbers, writes, step, parameters, groups):
    """For each output ways to read. numbers: for each input the places of its words in the wide words of all writes."""
    if not writes:
        return []
    stored = np.concatenate([side.addresses["sram"] for side in writes])
    # The next write to the same place, -1 for none.
    order = np.lexsort((np.concatenate([side.earliest for side in writes]), stored))
    again, same = np.full(len(stored), -1), np.flatnonzero(np.diff(stored[order]) == 0)
    again[order[same]] = order[same + 1]
    readings = []
    for port, (at, inputs, asked) in enumerate(found.reads):
        if not len(at):
            continue
        place = np.array([numbers[i][n] for i, n in zip(inputs, asked, strict=True)], dtype=np.int64)
        ways, first = [], None
        for way in (_by_runs, _by_rounds):
            try:
                ways += way(port, at, place, parameters, groups)
            except fit.NotAffineError as error:
                first = first or error
        if not ways:
            raise first or NotFoundError("rounds", f"output {port}: its rounds want more wide words than it holds")
        for side, _ in ways:
            inside = np.minimum(side.wide, len(stored) - 1)
            side.addresses["sram"] = (stored[inside] + step * (side.wide - inside)) % parameters.depth
            side.again = again[inside]
        readings.append(ways)
    return readings


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
    side = Side(f"sram2tb{port}", earliest, first - 2, first - 2, addresses, group[begins], 0, rounds, reads=True)
    return [(side, controller)]


def _by_rounds(port, at, place, parameters, groups):
    """An output whose loops have, in each round, as many fetches as the round of most wide words wants."""
    loops = fit.controller(at, {"word": place}, {"word": 40}, parameters.levels + 2)
    ways = []
    for size in itertools.accumulate(loops.extents[:-1], int.__mul__):
        with contextlib.suppress(fit.NotAffineError):
            ways += _rounds_of(size, port, at, place, parameters, groups)
    return ways


def _rounds_of(size, port, at, place, parameters, groups):
    """The way to read by rounds of `size` words, as `_by_rounds` has it; none where it wants a wide word before the
    first one, or too many."""
    fetch, rows = parameters.fetch, parameters.tb_rows
    times, places = at.reshape(-1, size), place.reshape(-1, size)
    held = places - places[:, :1] // fetch * fetch
    each = max(rows, int(held.max()) // fetch + 1)
    if held.min() < 0 or each > MOST:
        return []
    wide, number = places[:, :1] // fetch + np.arange(each), np.arange(len(times))[:, None] * each + held // fetch
    controller = _output(port, at, (number % rows * fetch + held % fetch).reshape(-1), parameters)
    latest, used = np.full(each * len(times), _NEVER), np.full(each * len(times), -_NEVER)
    # What comes in for nobody may stay for ever, but not go before what was there is used.
    np.minimum.at(latest, number.reshape(-1), at - 2)
    np.maximum.at(used, number.reshape(-1), at)
    needed, earliest = used >= 0, np.zeros_like(latest)
    if BUFFER in groups:
        for row in range(rows):
            earliest[row + rows :: rows] = np.maximum(0, np.maximum.accumulate(used[row::rows])[:-1] - 1)
    begins = times[:, 0]
    addresses = {"sram": None, "tb_row": np.arange(each * len(times)) % rows}
    first = (begins[:, None] + np.arange(each)).reshape(-1)
    side = Side(
        *(f"sram2tb{port}", earliest, latest, first, addresses, wide.reshape(-1), 0),  # type: ignore[arg-type]  # all of them are arrays
        [(len(times), begins), *_rounds(controller, at)],
        reads=True,
        needed=needed,
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


def templates(side: Side, widths: Mapping[str, int], levels: int) -> Iterator[np.ndarray]:
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


def _chosen(sides, groups, shapes, tries):
    """Cycles of each side, int64 [n] each, that delay least. tries: an iterator that ends after them. Raises
    `NotFoundError` without a cause."""
    stuck: dict = {}
    known: dict = {}
    writes = sum(not side.reads for side in sides)
    shapes = {id(side): list(shapes(side)) for side in sides}

    def options(number, taken):
        """``(cycles, the set of them)`` of a side, given those before it; the least delay first."""
        # They follow from the writes alone.
        key = number, b"".join(each.tobytes() for each in taken[:writes] if sides[number].reads)
        if key not in known:
            known[key] = [(each, set(each.tolist())) for each in within(sides[number], taken)]
        return known[key]

    def within(side, taken):
        earliest, latest = side.earliest, side.latest
        if side.reads:
            written, some = np.concatenate(taken[:writes]), slice(None) if side.needed is None else side.needed
            wide, again, earliest, latest = side.wide[some], side.again[some], earliest.copy(), latest.copy()
            earliest[some] = np.maximum(earliest[some], written[wide] + 1)
            if REUSE in groups:
                until = np.minimum(latest[some], written[again] - 1)
                latest[some] = np.where(again >= 0, until, latest[some])
        found = []
        for shape in shapes[id(side)]:
            if not length_hint(tries):
                break
            low, high = max(0, int((earliest - shape).max())), int((latest - shape).min())
            found += [shape + start for start in range(low, min(high, low + STARTS) + 1)]
        if not found:
            stuck.setdefault(side.name, None)
        return sorted(found, key=lambda cycles: int((cycles - earliest).sum()))

    def search(number, taken, occupied):
        if number == len(sides):
            return taken
        for cycles, mine in options(number, taken):
            if next(tries, None) is None:
                return None
            if PORT not in groups or occupied.isdisjoint(mine):
                found = search(number + 1, [*taken, cycles], occupied | mine)
                if found is not None:
                    return found
        return None

    found = search(0, [], set())
    if found is None:
        where = f", {next(iter(stuck))} none that keeps within its bounds" if stuck else ""
        raise NotFoundError(None, f"no affine schedules of the memory's accesses fit together{where}")
    return found
