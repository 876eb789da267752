"""Why a tile cannot give a stream, by counting; and why algebra found nothing.

`impossible` uses what holds for every configuration: what it raises is a proof. `check` counts what one choice of wide
words asks for: another choice may do.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.core.errors import TilewrightError
from tilewright.pushmem import fit
from tilewright.pushmem.memories import Parameters

_FAR = 1 << 40


@dataclass
class Words:
    """What moves. arrivals: for each input its cycles. reads: for each output ``(cycles, inputs, numbers of words)``.
    free: what of it may be any word, in words, or None."""

    arrivals: list[np.ndarray]
    reads: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    free: str | None = None

    def wanted(self, port: int) -> np.ndarray:
        """bool [words] of an input: those that go out."""
        found = np.zeros(len(self.arrivals[port]), dtype=bool)
        for _, inputs, numbers in self.reads:
            found[numbers[inputs == port]] = True
        return found


@dataclass
class Side:
    """Accesses of the memory by one controller, in order. earliest, latest: their bounds, int64 [n], without those that
    follow from other sides. first: what templates start from, int64 [n]. addresses: ``{name: [n]}``. wide: numbers of
    the wide words in the order of all writes, input by input, int64 [n]; of a fetch that nobody needs, any. ring: how
    many wide words of its input on the same place is written again. rounds: of the port's loops. reads: whether it
    fetches. again: of a fetch, the write that takes the place, -1 for none. needed: bool [n], or None for
    all."""

    name: str
    earliest: np.ndarray
    latest: np.ndarray
    first: np.ndarray
    addresses: dict[str, np.ndarray]
    wide: np.ndarray
    ring: int
    rounds: list[tuple[int, np.ndarray]]
    reads: bool = False
    again: np.ndarray | None = None
    needed: np.ndarray | None = None


class NoScheduleError(TilewrightError):
    """A stream that no configuration gives. cause: a word or two."""

    def __init__(self, cause: str | None, text: str):
        """State the cause, and what was counted."""
        super().__init__(text)
        self.cause = cause


class NotFoundError(NoScheduleError):
    """A stream for which algebra found no configuration; there may be one all the same."""


def affine(name: str, times: np.ndarray, levels: int, until: int) -> None:
    """Raise `NoScheduleError` for firings that no loops give, whatever the addresses. until: as `fit.controller` has
    it."""
    if len(times):
        try:
            fit.controller(times, {}, {}, levels, until)
        except fit.NotAffineError as error:
            raise NoScheduleError("not affine", f"{name}: {error}") from error


def impossible(moved: Words, parameters: Parameters) -> None:
    """Raise `NoScheduleError` where no configuration gives what `moved`, of `templates.words`, says.

    With aggregators a word can be written to the memory a cycle after it came, fetched a cycle later, and go out two
    cycles after that; without them it can be read a cycle after it came, and go out a cycle later. An access of the
    memory moves words of one input or of one output, and is the only one of its cycle.
    """
    wide = "agg2sram0" in parameters.ports()
    fetches: list = []
    keys: list = []
    came: list = []
    at: list = []
    least = 4 if wide else 2
    for port, (cycles, inputs, numbers) in enumerate(moved.reads):
        since = np.array([moved.arrivals[i][n] for i, n in zip(inputs, numbers, strict=True)], dtype=np.int64)
        if len(soon := np.flatnonzero(cycles - since < least)):
            cycle, where = int(cycles[soon[0]]), int(since[soon[0]])
            text = f"cycle {cycle}: output {port} gives a word that comes in at cycle {where}; a word takes at least"
            raise NoScheduleError("latency", f"{text} {least} cycles through the tile")
        _, begins = np.unique(inputs * _FAR + numbers, return_index=True)
        fetches.append((since[begins] + 2, cycles[begins] - 2))
        for each, column in ((keys, inputs * _FAR + numbers), (came, since), (at, cycles)):
            each.append(column)
    words, begins, at_word = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
    since, first, last = np.concatenate(came)[begins], np.full(len(words), _FAR), np.zeros(len(words), dtype=np.int64)
    np.minimum.at(first, at_word, np.concatenate(at))
    np.maximum.at(last, at_word, np.concatenate(at))
    if not len(words):
        return
    _held(since + 1, last if wide else last - 1, _room(moved, parameters))
    if wide:
        written = [
            (since[words // _FAR == port] + 1, first[words // _FAR == port] - 3) for port in range(len(moved.arrivals))
        ]
        _alone([*written, *fetches])


def _room(moved, parameters):
    """Words that a tile holds: in its memory, in the register behind it, and at the inputs and outputs in use."""
    room = parameters.depth * parameters.fetch
    if "agg2sram0" in parameters.ports():
        inputs, outputs = sum(len(at) > 0 for at in moved.arrivals), sum(len(at) > 0 for at, _, _ in moved.reads)
        room += parameters.fetch * (1 + parameters.rows * inputs + parameters.tb_rows * outputs)
    return room


def _held(begin, end, room):
    """Raise where more words than `room` have to be in the tile at once: each from cycle `begin` to `end`."""
    change = np.zeros(int(end.max()) + 2, dtype=np.int64)
    np.add.at(change, begin, 1)
    np.add.at(change, end + 1, -1)
    live = np.cumsum(change)
    if live.max() > room:
        cycle, count = int(live.argmax()), int(live.max())
        text = f"cycle {cycle}: {count} words that came in and are still needed, of {room} that the tile holds"
        raise NoScheduleError("memory words", text)


def _alone(windows):
    """Raise where accesses that cannot be one are too many. windows: ``(earliest, latest)`` of the words of each
    controller: those that have no cycle in common are moved by different accesses."""
    chosen = []
    for earliest, latest in windows:
        end = -1
        for at in np.argsort(latest, kind="stable").tolist():
            if earliest[at] > end:
                end = int(latest[at])
                chosen.append((int(earliest[at]), end))
    if not chosen:
        return
    if (found := crowded(*np.array(chosen, dtype=np.int64).T)) is not None:
        raise _too_many(*found)


def _too_many(first, last, count, kind=NoScheduleError):
    return kind(
        "memory port",
        f"cycles {first} to {last}: {count} accesses of the memory, which has one a cycle, in {last - first + 1}",
    )


def check(sides: Sequence[Side]) -> None:
    """Raise `NotFoundError` where bounds of the accesses alone leave no way. sides: those that write
    first."""
    bounds = _bounds(sides)
    for side, (earliest, latest) in zip(sides, bounds, strict=True):
        crossed = np.flatnonzero(earliest > latest)
        if len(crossed):
            raise _crossed(side, int(crossed[0]), int(earliest[crossed[0]]), int(latest[crossed[0]]))
    for number, side in enumerate(sides):
        if not side.reads:
            _live(number, sides, bounds)
    earliest, latest = (np.concatenate(each) for each in zip(*bounds, strict=True))
    if (found := crowded(earliest, latest)) is not None:
        raise _too_many(*found, kind=NotFoundError)


def _bounds(sides):
    """``[(earliest, latest)]`` of each side, with what reads and writes ask of each other."""
    bounds = [[side.earliest.copy(), side.latest.copy()] for side in sides]
    writes = [number for number, side in enumerate(sides) if not side.reads]
    earliest, latest = (np.concatenate([bounds[number][each] for number in writes]) for each in (0, 1))
    for number, side in enumerate(sides):
        if side.reads:
            bounds[number][0] = np.maximum(bounds[number][0], earliest[side.wide] + 1)
            np.minimum.at(latest, side.wide, bounds[number][1] - 1)
    for number in writes:
        first = sides[number].wide[0]
        bounds[number][1] = latest[first : first + len(sides[number].wide)]
    return bounds


def _crossed(side, at, earliest, latest):
    full = "a word takes at least 7 cycles through the tile where wide words are full"
    if not side.reads:
        text = f"{side.name}: wide word {at} can be written from cycle {earliest} on, and is needed by cycle {latest}"
        return NotFoundError("latency", f"{text}; {full}")
    text = f"{side.name}: fetch {at} has to be over by cycle {latest}, and its"
    if side.earliest[at] > side.latest[at]:
        text = f"{text} row of the transpose buffer is in use until cycle {earliest + 1}: the row is needed twice"
        return NotFoundError("transpose buffer", text)
    return NotFoundError("latency", f"{text} wide word is written in {earliest - 1} at the earliest; {full}")


def _live(number, sides, bounds):
    """Raise where more wide words have to be in the memory than it has."""
    last, first = np.full(len(sides[number].earliest), -1), sides[number].wide[0]
    for side, (earliest, _) in zip(sides, bounds, strict=True):
        if side.reads:
            own = (side.wide >= first) & (side.wide < first + len(last))
            np.maximum.at(last, side.wide[own] - first, earliest[own])
    there = np.flatnonzero(last > bounds[number][1])
    if not len(there):
        return
    change = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(change, bounds[number][1][there] + 1, 1)
    np.add.at(change, last[there] + 1, -1)
    live = np.cumsum(change)
    ring = sides[number].ring
    if live.max() > ring:
        cycle, count = int(live.argmax()), int(live.max())
        text = f"cycle {cycle}: {count} wide words that came in and are still needed, of {ring} that the memory has"
        raise NotFoundError("memory words", text)


def crowded(earliest: np.ndarray, latest: np.ndarray) -> tuple[int, int, int] | None:
    """``(first, last, count)`` of cycles in which more accesses have to be than there are cycles; None where one access
    a cycle is enough for all. earliest, latest: int64 [n], inclusive. By earliest deadline first, which is exact."""
    order = np.argsort(earliest, kind="stable")
    waiting: list = []
    done: list = []
    at, cycle = 0, 0
    while at < len(order) or waiting:
        if not waiting:
            cycle = max(cycle, int(earliest[order[at]]))
        while at < len(order) and earliest[order[at]] <= cycle:
            heapq.heappush(waiting, (int(latest[order[at]]), int(earliest[order[at]])))
            at += 1
        due, begin = heapq.heappop(waiting)
        if due < cycle:
            return _window(done, due, begin)
        done.append((cycle, due, begin))
        cycle += 1
    return None


def _window(done, due, begin):
    """The cycles that are too few: back to where the port was free, or busy with what could wait."""
    count, first, before = 1, begin, None
    for cycle, limit, came in reversed(done):
        if limit > due or (before is not None and cycle != before - 1 and first >= before):
            break
        before, first, count = cycle, min(first, came), count + 1
    return first, due, count
