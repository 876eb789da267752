"""A tile's controllers by search, where no template has them: for streams of a few hundred words.

Loops of the ports are told by when words come in and go out, and so is what a fetch has to hold, once it is known when
fetches are. Lanes are sought first: that of a word where it comes in is that where it goes out, and both follow loops.
Then come rows of the aggregators and of the transpose buffers, times of fetches and of writes, and last the addresses
in the memory. Nothing is assumed of words that are stale, written twice, or never asked for: what is found is run.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from time import perf_counter

import numpy as np

from tilewright.pushmem import fit
from tilewright.pushmem.counting import NotFoundError, Words
from tilewright.pushmem.memories import Memory, _events
from tilewright.pushmem.settings import Configuration

# Words of a port, and nests of its loops, at most.
WORDS, NESTS = 600, 10
# Of one search after the other: accesses of a round and cycles between them, at most; whether rounds may be further
# apart or closer than the port's; starts of fetches, and lanes, that are tried.
SIZES = (
    *((1, False, 4, 8), (2, False, 6, 8), (1, True, 6, 8), (2, True, 8, 8)),
    *((1, False, 4, 99), (2, False, 8, 999), (2, True, 8, 999), (4, True, 16, 9999)),
)
EACH, STARTS = 4, 16
# Ways to read that are tried of one choice of lanes, for each choice of lanes of that search.
PAIRS = 8
# Ways to write that are kept for one choice of what is read.
WAYS = 6
_NEVER = 1 << 40

Nest = tuple[int, ...]


class TimeOverError(NotFoundError):
    """The time of the search is over."""

    def __init__(self) -> None:
        """State it."""
        super().__init__("time", "the time of the search is over")


class _Nothing(NotFoundError):
    """A search that is over without a find."""


def nests(at: np.ndarray, levels: int) -> list[Nest]:
    """Extents, innermost first, of loops that give the cycles `at`: the fewest, then each of them cut in two, twice."""
    try:
        found = [fit.controller(at, {}, {}, levels).extents]
    except fit.NotAffineError:
        return []
    for turn in (0, 1):
        for nest in found[: 1 if not turn else NESTS]:
            for place, extent in enumerate(nest):
                cuts = [each for each in range(2, extent) if extent % each == 0]
                found += [(*nest[:place], each, extent // each, *nest[place + 1 :]) for each in cuts]
    return list(dict.fromkeys(found))[:NESTS]


@cache
def _indices(nest):
    """int64 [n, levels]: of each iteration."""
    return np.indices(nest[::-1]).reshape(len(nest), int(np.prod(nest))).T[:, ::-1]


def _corners(nest):
    """The first iteration of each level but its first round."""
    return list(itertools.accumulate(nest[:-1], int.__mul__, initial=1)) if nest else []


def _affine(rows, nest, modulus):
    """bool [C]: which rows [C, n] are affine in a nest, modulo `modulus`."""
    steps = [(rows[:, stride] - rows[:, 0]) % modulus for stride in _corners(nest)]
    wanted = rows[:, :1] + np.array(steps, dtype=np.int64).reshape(len(nest), len(rows)).T @ _indices(nest).T
    return ((wanted - rows) % modulus == 0).all(1)


def _shapes(at, levels, most, owned) -> Iterator[np.ndarray]:
    """Cycles of accesses, the first one's being 0, with loops of a port: at most `most` each round. owned: whether
    rounds may also be further apart or closer than the port's."""
    seen = set()
    for own in (False, True)[: 1 + owned]:
        for nest in nests(at, levels):
            for size in dict.fromkeys(itertools.accumulate((1, *nest), int.__mul__)):
                begins = at[::size] - at[0]
                paces = range(1, int(begins[1]) + 9) if own and len(begins) > 1 else (0,)
                for each, step, pace in itertools.product(range(1, most + 1), range(1, most + 1), paces):
                    if each == 1 and step > 1:
                        continue
                    rounds = pace * np.arange(len(begins)) if pace else begins
                    shape = (rounds[:, None] + step * np.arange(each)).reshape(-1)
                    if (np.diff(shape) > 0).all() and shape.tobytes() not in seen:
                        seen.add(shape.tobytes())
                        yield shape


class _Search:
    def __init__(self, found, memory, right, end, most, owned, starts, lanes):
        self.found, self.memory, self.right, self.end, self.starts = found, memory, right, end, starts
        self.parameters, self.lanes = memory.PARAMETERS, lanes
        self.ports = [port for port in range(len(found.arrivals)) if found.wanted(port).any()]
        self.outs = [out for out, (at, _, _) in enumerate(found.reads) if len(at)]
        levels = self.parameters.levels
        self.read_nests = {out: nests(found.reads[out][0], levels) for out in self.outs}
        self.fetch_shapes = {out: self._listed(found.reads[out][0], most, owned) for out in self.outs}
        self.write_shapes = {port: self._listed(found.arrivals[port], most, owned) for port in self.ports}
        self.partitions: dict = {}
        self.ways: dict = {}
        self.loops: dict = {}
        self.rows: dict = {}
        self.failed: set = set()

    def _listed(self, at, most, owned):
        listed = []
        for shape in _shapes(at, self.parameters.levels - 1, most, owned):
            self.in_time()
            listed.append(shape)
        return listed

    def in_time(self):
        if perf_counter() > self.end:
            raise TimeOverError

    def run(self) -> Configuration:
        """The first configuration that is right. Raises `NotFoundError`."""
        wanted = [self._placed(port) for port in self.ports]
        for places in itertools.product(*wanted):
            for lanes in itertools.islice(itertools.product(*(each["lanes"] for each in places)), self.lanes):
                self.in_time()
                outs = [self._buffers(out, places, lanes) for out in self.outs]
                if all(outs):
                    found = self._of_lanes(places, lanes, outs)
                    if found is not None:
                        return found
        raise _Nothing("search", "no loops of the tile's inner controllers were found")

    def _placed(self, port):
        """For each nest of an input: places of its words in the aggregator, by their lanes."""
        at, made = self.found.arrivals[port], []
        size, fetch = self.parameters.rows * self.parameters.fetch, self.parameters.fetch
        for nest in nests(at, self.parameters.levels):
            self.in_time()
            if len(nest) > 3:
                continue
            steps = np.array(list(itertools.product(range(size), repeat=len(nest))), dtype=np.int64)
            places = (steps.reshape(len(steps), -1) @ _indices(nest).T).astype(np.uint8)
            places = ((places[:, None] + np.arange(fetch, dtype=np.uint8)[:, None]) % size).reshape(-1, len(at))
            places = np.unique(places, axis=0)
            lanes, group = np.unique(places % fetch, axis=0, return_inverse=True)
            group = group.reshape(-1)
            # Each word has a lane of its own round by round: such lanes come first.
            order = sorted(
                range(len(lanes)), key=lambda each: (-len(set(lanes[each][:fetch].tolist())), lanes[each].tolist())
            )
            made.append({"lanes": [(each, lanes[each]) for each in order], "places": places, "group": group})
        return made

    def _buffers(self, out, places, lanes):
        """``[(addresses in the transpose buffer)]`` of an output's words, that loops give, for these lanes."""
        _, inputs, numbers = self.found.reads[out]
        mine, fetch = np.zeros(len(numbers), np.int64), self.parameters.fetch
        for port, (_, lane) in zip(self.ports, lanes, strict=True):
            mine[inputs == port] = lane[numbers[inputs == port]]
        found: dict = {}
        for nest in self.read_nests[out]:
            if not _affine(mine[None], nest, fetch)[0]:
                continue
            steps = [(mine[stride] - mine[0]) % fetch for stride in _corners(nest)]
            for bits in itertools.product(range(self.parameters.tb_rows), repeat=len(nest)):
                whole = np.array([step + fetch * bit for step, bit in zip(steps, bits, strict=True)], dtype=np.int64)
                address = (mine[0] + _indices(nest) @ whole) % (fetch * self.parameters.tb_rows)
                found.setdefault(address.tobytes(), address)
        return list(found.values())

    def _fetched(self, out, rows):
        """``{which fetch each word is of: [(cycles, rows) of the fetches]}``. rows: of the words."""
        key = out, rows.tobytes()
        if key in self.partitions:
            return self.partitions[key]
        at, made = self.found.reads[out][0], dict[bytes, list]()
        last = int(at[0]) - 2
        starts = np.arange(last, max(-1, last - self.starts), -1)
        for shape in self.fetch_shapes[out]:
            self.in_time()
            for own in self._fetch_rows(len(shape)):
                of = np.full((len(starts), len(at)), -1)
                for row in range(self.parameters.tb_rows):
                    members, some = np.flatnonzero(own == row), rows == row
                    if len(members):
                        place = np.searchsorted(shape[members], at[some] - 2 - starts[:, None], side="right") - 1
                        of[:, some] = np.where(place >= 0, members[place], -1)
                for start in np.flatnonzero((of >= 0).all(1)).tolist():
                    made.setdefault(of[start].tobytes(), []).append((shape + starts[start], own))
        self.partitions[key] = made
        return made

    def _fetch_rows(self, count):
        """Rows that fetches fill: in turn, or always the same ones."""
        turn = np.arange(count)
        yield turn % self.parameters.tb_rows
        yield np.zeros(count, np.int64)
        for each in range(2, EACH + 1):
            if count % each == 0 and each < count:
                yield turn // each % self.parameters.tb_rows
        if count > 1:
            yield (turn % 2 + turn // 2) % self.parameters.tb_rows

    def _of_lanes(self, places, lanes, outs):
        """A configuration with these lanes, None where none is found."""
        fetch, chosen = self.parameters.fetch, []
        for port, place, (group, _) in zip(self.ports, places, lanes, strict=True):
            mine = place["places"][place["group"] == group]
            chosen.append((mine, _until(mine, self.found.arrivals[port], fetch * self.parameters.rows)))
        options: list[list] = []
        for out, addresses in zip(self.outs, outs, strict=True):
            options.append([])
            for address in addresses:
                for key, ways in self._fetched(out, address // fetch).items():
                    self.in_time()
                    asked = self._asked(out, np.frombuffer(key, np.int64), address % fetch, chosen)
                    if asked is not None:
                        options[-1].append((address, ways, *asked))
        # Of several outputs those ways come first that are early in all of them.
        every = itertools.product(*(range(len(ways)) for ways in options))
        for numbers in sorted(itertools.islice(every, 1 << 14), key=sum)[: PAIRS * self.lanes]:
            taken = [ways[at] for ways, at in zip(options, numbers, strict=True)]
            found = self._written(taken, chosen)
            if found is not None:
                return found
        return None

    def _asked(self, out, of, lane, chosen):
        """``([(fetch, input, numbers of words)], which places of each input have them together)``; None for none."""
        _, inputs, numbers = self.found.reads[out]
        groups: dict = {}
        for each, *word in zip(of.tolist(), lane.tolist(), inputs.tolist(), numbers.tolist(), strict=True):
            held = groups.setdefault(each, {})
            if held.setdefault(word[0], word) != word or next(iter(held.values()))[1] != word[1]:
                return None
        asked, masks = [], [np.ones(len(places), bool) for places, _ in chosen]
        for each, held in groups.items():
            words = np.array([number for _, _, number in held.values()])
            port = next(iter(held.values()))[1]
            at = self.ports.index(port)
            places, until = chosen[at]
            rows = places[:, words] // self.parameters.fetch
            begin = int(self.found.arrivals[port][words].max()) + 1
            masks[at] = masks[at] & (rows == rows[:, :1]).all(1) & (until[:, words].min(1) >= begin)
            if not masks[at].any():
                return None
            asked.append((each, at, words))
        return asked, masks

    def _written(self, taken, chosen):
        """A configuration for these fetches, None where none is found."""
        mine = []
        for at, (places, until) in enumerate(chosen):
            mask = np.logical_and.reduce([masks[at] for *_, masks in taken])
            wanted = [words for *_, asked, _ in taken for _, which, words in asked if which == at]
            begins = self.found.arrivals[self.ports[at]]
            low, some = [int(begins[words].max()) + 1 for words in wanted], np.flatnonzero(mask)
            rows = np.array([places[some, words[0]] // self.parameters.fetch for words in wanted])
            high = np.array([until[some][:, words].min(1) for words in wanted])
            seen: dict = {}
            for number, *told in zip(some.tolist(), rows.T.tolist(), high.T.tolist(), strict=True):
                seen.setdefault(
                    tuple((row, (begin, end)) for row, begin, end in zip(told[0], low, told[1], strict=True)), number
                )
            ways = []
            for asked, number in seen.items():
                self.in_time()
                ways += [(places[number], *way, asked) for way in self._ways(at, asked)]
                if len(ways) >= WAYS * 4:
                    break
            if not ways:
                return None
            mine.append(ways)
        for writes in itertools.product(*mine):
            for reads in itertools.product(*(ways[: WAYS * 4] for _, ways, *_ in taken)):
                self.in_time()
                found = self._joined(taken, writes, reads)
                if found is not None:
                    return found
        return None

    def _ways(self, at, asked):
        """``[(cycles, rows)]`` of writes of an input that give all of `asked`, ``((row, (from, to)), ...)``."""
        if not asked:
            return [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        if (at, asked) in self.ways:
            return self.ways[at, asked]
        rows, low, high = (np.array(each) for each in zip(*((row, *span) for row, span in asked), strict=True))
        first, found, levels = int(self.found.arrivals[self.ports[at]][0]), [], self.parameters.levels
        for shape in self.write_shapes[self.ports[at]]:
            self.in_time()
            for start in range(max(first + 1, int(low.min()) - int(shape[-1])), int(high.min()) + 1)[: 2 * STARTS]:
                times = shape + start
                inside = (times[:, None] >= low) & (times[:, None] <= high)
                if not inside.any(0).all():
                    continue
                given = self._rows(times, inside, rows, levels)
                if given is not None:
                    found.append((times, given))
                    break
            if len(found) >= WAYS:
                break
        self.ways[at, asked] = found
        return found

    def _rows(self, times, inside, rows, levels):
        """Rows that writes at `times` give, so that each that is asked for is given in time; None for none."""
        count, key = self.parameters.rows, (times - times[0]).tobytes()
        if key not in self.rows:
            self.rows[key] = []
            for nest in nests(times, levels):
                if len(nest) <= 3:
                    steps = np.array(list(itertools.product(range(count), repeat=len(nest) + 1)), dtype=np.int64)
                    self.rows[key].append((steps[:, :1] + steps[:, 1:] @ _indices(nest).T) % count)
        for made in self.rows[key]:
            right = np.ones(len(made), bool)
            for row in range(count):
                asked = inside[:, rows == row]
                right &= (((made == row).astype(np.int64) @ asked) > 0).all(1)
            if right.any():
                return made[int(right.argmax())]
        return None

    def _joined(self, taken, writes, reads):
        """The configuration of these writes and fetches, None where it is not right."""
        every = np.concatenate([*(times for _, times, *_ in writes), *(times for times, _ in reads)])
        if len(np.unique(every)) < len(every):
            return None
        pairs: list = []
        told = [0] * len(writes)
        for out, ((_, _, asked, _), (times, _)) in enumerate(zip(taken, reads, strict=True)):
            for fetch, at, _ in asked:
                _, when, rows, spans = writes[at]
                # In the order in which they were asked for.
                row, (begin, until) = spans[told[at]]
                told[at] += 1
                serve = (rows == row) & (when >= begin) & (when <= until) & (when < times[fetch])
                if not serve.any():
                    return None
                pairs.append((out, fetch, at, np.flatnonzero(serve)))
        behind = np.cumsum([0, *(len(when) for _, when, *_ in writes)])
        asks = np.zeros((len(pairs), behind[-1]), bool)
        for number, (_, _, at, some) in enumerate(pairs):
            asks[number, behind[at] + some] = True
        wrote = np.concatenate([when for _, when, *_ in writes])
        read = [(len(writes) + out, fetch) for out, fetch, _, _ in pairs]
        names = [f"agg2sram{port}" for port in self.ports] + [f"sram2tb{out}" for out in self.outs]
        rows = [{"agg_row": rows} for _, _, rows, _ in writes] + [{"tb_row": rows} for _, rows in reads]
        times = [when for _, when, *_ in writes] + [when for when, _ in reads]
        loops = [self._loops(when) for when in times]
        # Other times of the same accesses ask for the same addresses.
        key = *loops, *((out, fetch, at, some.tobytes()) for out, fetch, at, some in pairs)
        if None in loops or key in self.failed:
            return None
        self.failed.add(key)
        seen: list = []
        for last in (-1, 0):
            chosen = [(at, int(some[last]), len(writes) + out, fetch) for out, fetch, at, some in pairs]
            if chosen in seen:
                continue
            seen.append(chosen)
            when = np.array([times[reader][fetch] for reader, fetch in read])
            for given in _in_memory(times, loops, chosen, self.parameters.depth):
                wanted = np.array([given[reader][fetch] for reader, fetch in read])
                latest = _events.latest(wrote, np.concatenate(given[: len(writes)]), when, wanted)
                if (latest < 0).any() or not asks[np.arange(len(pairs)), latest].all():
                    continue
                made = self._made(names, times, rows, given, writes, taken)
                if made is not None and self.right(made):
                    return made
        return None

    def _loops(self, when):
        """The fewest loops of accesses, None for none."""
        # The first cycle is of no account.
        key = (when - when[0]).tobytes() if len(when) else b""
        if key not in self.loops:
            self.loops[key] = next(iter(nests(when, self.parameters.levels)), None) if len(when) else ()
        return self.loops[key]

    def _made(self, names, times, rows, given, writes, taken):
        ports, found, levels = self.parameters.ports(), {}, self.parameters.levels
        told = {
            name: (when, {**row, "sram": sram}) for name, when, row, sram in zip(names, times, rows, given, strict=True)
        }
        for port, at in enumerate(self.found.arrivals):
            # Of words that nobody asks for.
            told[f"in2agg{port}"] = at, {"agg": np.zeros(len(at), np.int64)}
        for port, (place, *_) in zip(self.ports, writes, strict=True):
            told[f"in2agg{port}"] = self.found.arrivals[port], {"agg": place.astype(np.int64)}
        for out, (address, *_) in zip(self.outs, taken, strict=True):
            told[f"tb2out{out}"] = self.found.reads[out][0], {"tb": address}
        try:
            for name, port in ports.items():
                if name in told and len(told[name][0]):
                    found[name] = fit.controller(*told[name], port.addresses, levels)
        except fit.NotAffineError:
            return None
        return Configuration(self.memory.NAME, found)


def _until(places, at, size):
    """int64 [C, n]: the cycle in which the place of each word is written anew, `_NEVER` for none. places: [C, n]."""
    until, last = np.empty(places.shape, np.int64), np.full((len(places), size), _NEVER)
    every = np.arange(len(places))
    for number in reversed(range(len(at))):
        until[:, number] = last[every, places[:, number]]
        last[every, places[:, number]] = at[number]
    return until


def _in_memory(times, loops, pairs, depth):
    """Yield addresses of each controller's accesses: of a pair ``(writer, write, reader, fetch)`` they are the same.

    Starts and steps of all loops are unknowns of equations without a constant: what solves them is combined.
    """
    first = np.cumsum([0, *(1 + len(nest) for nest in loops)])
    equations = set()
    tables = [np.column_stack([np.ones(len(when), np.int64), _indices(nest)]) if len(when) else None
              for when, nest in zip(times, loops, strict=True)]  # fmt: skip
    for writer, write, reader, fetch in pairs:
        row = np.zeros(first[-1], np.int64)
        row[first[writer] : first[writer + 1]] += tables[writer][write]
        row[first[reader] : first[reader + 1]] -= tables[reader][fetch]
        equations.add(tuple(row.tolist()))
    basis = kernel(tuple(sorted(equations)), int(first[-1]))
    seen = set()
    for weights in _weights(len(basis)):
        unknown = sum(
            (weight * each for weight, each in zip(weights, basis, strict=True)), np.zeros(first[-1], np.int64)
        )
        given = [
            table @ unknown[first[at] : first[at + 1]] % depth if table is not None else np.zeros(0, np.int64)
            for at, table in enumerate(tables)
        ]
        key = b"".join(each.tobytes() for each in given)
        if key not in seen:
            seen.add(key)
            yield given


def _weights(count):
    """Weights of solutions: numbers that are far from each other, and none at all."""
    yield tuple(1 << place for place in range(count))
    yield tuple(1 << place for place in reversed(range(count)))
    yield (0,) * count


@lru_cache(1 << 12)
def kernel(rows: tuple[tuple[int, ...], ...], count: int) -> list[np.ndarray]:
    """Whole numbers, int64 [count] each, that solve all `rows` of an equation without a constant, and span them all."""
    done: dict = {}

    def without(row, place, other):
        """`row` less so much of `other` that nothing is left in a place."""
        one, more = other[place], row[place]
        made = [each * one - more * less for each, less in zip(row, other, strict=True)]
        least = math.gcd(*made) or 1
        return [each // least for each in made]

    for each in rows:
        row = list(each)
        for place, other in done.items():
            row = without(row, place, other) if row[place] else row
        place = next((at for at, each in enumerate(row) if each), None)
        if place is not None:
            done = {at: without(other, place, row) if other[place] else other for at, other in done.items()}
            done[place] = row
    found = []
    for free in (at for at in range(count) if at not in done):
        scale = math.lcm(*(abs(row[place]) for place, row in done.items() if row[free]))
        made = [scale * int(at == free) for at in range(count)]
        for place, row in done.items():
            made[place] = -row[free] * scale // row[place]
        found.append(np.array(made, dtype=np.int64))
    return found


def _narrow(found, memory, right, end):
    """A configuration of a memory without aggregators: its accesses are those of the ports."""
    ports, levels = memory.PARAMETERS.ports(), memory.PARAMETERS.levels
    at, (asked, _, numbers) = found.arrivals[0], found.reads[0]
    times, pairs = [at, asked - 1], [(0, number, 1, read) for read, number in enumerate(numbers.tolist())]
    for loops in itertools.product(*(nests(when, levels) for when in times)):
        if perf_counter() > end:
            raise TimeOverError
        for given in _in_memory(times, loops, pairs, memory.PARAMETERS.depth):
            if (_events.latest(at, given[0], times[1], given[1]) != numbers).any():
                continue
            with contextlib.suppress(fit.NotAffineError):
                made = [fit.controller(when, {"sram": sram}, port.addresses, levels)
                        for when, sram, port in zip(times, given, ports.values(), strict=True)]  # fmt: skip
                found_one = Configuration(memory.NAME, dict(zip(ports, made, strict=True)))
                if right(found_one):
                    return found_one
    raise _Nothing("search", "no loops of addresses were found")


def configuration(found: Words, memory: Memory, right: Callable[[Configuration], bool], end: float) -> Configuration:
    """The `Configuration` that gives what moves. right: whether a configuration gives the stream; end: of the time.

    Raises `NotFoundError` where none is found by then, and for streams of more than `WORDS` words of a port.
    """
    if max(len(at) for at, *_ in [*((at,) for at in found.arrivals), *found.reads]) > WORDS:
        raise NotFoundError("search", f"more than {WORDS} words of a port are not searched")
    if not any(len(at) for at, *_ in found.reads):
        raise NotFoundError("search", "no word goes out")
    if "agg2sram0" not in memory.PARAMETERS.ports():
        return _narrow(found, memory, right, end)
    for size in SIZES:
        with contextlib.suppress(_Nothing):
            return _Search(found, memory, right, end, *size).run()
    raise NotFoundError("search", "no loops of the tile's inner controllers were found")
