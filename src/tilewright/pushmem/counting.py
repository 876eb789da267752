"""Why a tile cannot give a stream, by counting: bounds that cross, too many live words, too many accesses."""

import heapq

import numpy as np

from tilewright.core.errors import TilewrightError


class NoScheduleError(TilewrightError):
    """A stream that no schedule of the tile gives. cause: a word or two; told: what was counted, numbers by name."""

    def __init__(self, cause, text, **told):
        """State the cause and what was counted."""
        super().__init__(text)
        self.cause, self.told = cause, told


class UndecidedError(TilewrightError):
    """A stream that does not say enough for algebra: what goes out may be any word."""


def check(sides, depth: int) -> None:
    """Raise `NoScheduleError` where bounds of the accesses alone leave no way. sides: of `inner.Side`."""
    bounds = _bounds(sides)
    for side, (earliest, latest) in zip(sides, bounds, strict=True):
        crossed = np.flatnonzero(earliest > latest)
        if len(crossed):
            raise _crossed(side, int(crossed[0]), int(earliest[crossed[0]]), int(latest[crossed[0]]))
    for number, side in enumerate(sides):
        if side.source is None:
            _live(number, sides, bounds, depth)
    earliest, latest = (np.concatenate(each) for each in zip(*bounds, strict=True))
    if (found := crowded(earliest, latest)) is not None:
        first, last, count = found
        raise NoScheduleError(
            "memory port",
            f"cycles {first} to {last}: {count} accesses of the memory, which has one a cycle, in {last - first + 1}",
            first=first,
            last=last,
            accesses=count,
        )


def _bounds(sides):
    """``[(earliest, latest)]`` of each side, with what reads and writes ask of each other."""
    bounds = [[side.earliest.copy(), side.latest.copy()] for side in sides]
    for number, side in enumerate(sides):
        if side.source is None:
            continue
        bounds[number][0] = np.maximum(bounds[number][0], bounds[side.source][0][side.wide] + 1)
        np.minimum.at(bounds[side.source][1], side.wide, bounds[number][1] - 1)
    return bounds


def _crossed(side, at, earliest, latest):
    told = {"access": at, "earliest": earliest, "latest": latest}
    if side.source is None:
        text = f"{side.name}: wide word {at} can be written from cycle {earliest} on, and is needed by cycle {latest}"
        return NoScheduleError(
            "latency", f"{text}; a word takes at least 7 cycles through the tile where wide words are full", **told
        )
    if side.earliest[at] > side.latest[at]:
        text = (
            f"{side.name}: fetch {at} has to be over by cycle {latest}, and its row of the transpose buffer is in use"
        )
        return NoScheduleError(
            "transpose buffer", f"{text} until cycle {earliest + 1}: the row is needed twice", **told
        )
    text = f"{side.name}: fetch {at} has to be over by cycle {latest}, and its wide word is written in {earliest - 1}"
    return NoScheduleError(
        "latency",
        f"{text} at the earliest; a word takes at least 7 cycles through the tile where wide words are full",
        **told,
    )


def _live(number, sides, bounds, depth):
    """Raise where more wide words have to be in the memory than it has."""
    last = np.full(len(sides[number].earliest), -1)
    for side, (earliest, _) in zip(sides, bounds, strict=True):
        if side.source == number:
            np.maximum.at(last, side.wide, earliest)
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
        raise NoScheduleError("memory words", text, cycle=cycle, count=count, depth=ring)


def crowded(earliest, latest) -> tuple[int, int, int] | None:
    """``(first, last, count)`` of cycles in which more accesses have to be than there are cycles; None where one access
    a cycle is enough for all. earliest, latest: int64 [n], inclusive. By earliest deadline first, which is exact."""
    order = np.argsort(earliest, kind="stable")
    waiting, at, cycle, done = [], 0, 0, []
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
