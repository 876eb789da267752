"""Wide words: schedules of a tile's writes and fetches that keep its single SRAM port free of conflicts.

A stream of words is strip-mined by the fetch width. Writes and fetches take affine schedules between the bounds that
aggregator and transpose buffer set; a small exact search chooses offsets and inner strides for all streams of a tile.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.pushmem.fit import integers
from tilewright.pushmem.settings import Affine, Controller, generate

AGG_ROWS = 4
TB_ROWS = 2
_FAR = 1 << 40
# ASSUME: a tile whose streams do not fit after this many offsets is taken as full. Those of the apps need fewer.
_BUDGET = 6000
# Wide words of the longest row that is split off a longer loop.
_ROW = 33


@dataclass(frozen=True)
class Stream:
    """Words in the order of time: the cycle of each, and its address in the buffer with padded rows.

    live: which are used, None for all; others only keep the loops whole.
    """

    times: np.ndarray
    addresses: np.ndarray
    live: np.ndarray | None = None


@dataclass(frozen=True)
class Use:
    """What a buffer asks of a tile: the words of signal `source`, and the streams to deliver by target signal.

    tiles: of the chain that keeps it, 1 for a tile alone."""

    buffer: str
    source: str
    write: Stream
    reads: tuple[tuple[str, Stream], ...]
    tiles: int = 1


def controller(times: np.ndarray, **addresses: np.ndarray) -> Controller | None:
    """The loops of events at `times` with the given addresses, or None where six levels do not hold them."""
    table = np.stack([times, *addresses.values()], axis=1)
    found = integers(table)
    if found is None:
        return None
    affines = [Affine(int(start), tuple(s[c] for s in found[1])) for c, start in enumerate(table[0])]
    return Controller(tuple(found[0]), affines[0], dict(zip(addresses, affines[1:], strict=True)))


@dataclass(frozen=True)
class _Choice:
    """A way to schedule one port: events at ``base + offset`` for low <= offset <= high."""

    base: np.ndarray
    low: int
    high: int
    wide: np.ndarray
    template: tuple


def _runs(wide):
    starts = np.flatnonzero(np.r_[True, wide[1:] != wide[:-1]])
    ends = np.r_[starts[1:], len(wide)] - 1
    return starts, ends, np.repeat(np.arange(len(starts)), ends - starts + 1)


def _bases(first, wide, split=False):
    """Affine schedules near `first`: its own, and others whose inner stride differs."""
    own = integers(np.stack([first, wide], axis=1), 5)
    if own is None:
        first = _whole_rows(first, wide)
        own = None if first is None else integers(np.stack([first, wide], axis=1), 5)
    if own is None:
        return
    extents, strides = own
    times = [s[0] for s in strides]
    if not extents:
        yield first
        return
    for inner in dict.fromkeys([times[0], 3, 4, 2, 5, 1]):
        yield generate(extents, [inner, *times[1:]], int(first[0]))
    # Rows that follow each other without a gap are one loop; three cycles a word leave room only row by row. A part of
    # a row may begin a little off its words, so that all parts meet the same cycles modulo three.
    for row in range(2, min(extents[0] + 1, _ROW) if split else 2):
        if extents[0] % row == 0 and times[0] > 3:
            parts = [row, extents[0] // row, *extents[1:]]
            for step in dict.fromkeys([row * times[0], row * times[0] // 3 * 3, -(-row * times[0] // 3) * 3]):
                yield generate(parts, [3, step, *times[1:]], int(first[0]))


def _whole_rows(first, wide):
    """`first` as if each row began with a whole wide word: as much before the second one as that is before the third.
    None where rows are not alike."""
    for row in range(3, len(wide) + 1):
        if len(wide) % row == 0:
            rows = first.reshape(-1, row).copy()
            step = rows[0, 2] - rows[0, 1]
            if (np.diff(rows[:, 1:], axis=1) == step).all():
                rows[:, 0] = rows[:, 1] - step
                return rows.ravel()
    return None


def write_choices(stream: Stream, fetch: int) -> list[_Choice]:
    """Ways to move complete wide words from the aggregator to the SRAM."""
    wide = stream.addresses // fetch
    starts, ends, _ = _runs(wide)
    first, complete, wide = stream.times[starts], stream.times[ends], wide[starts]
    choices = []
    for base in _bases(first, wide, split=True):
        low = int((complete + 1 - base).max())
        later = first[AGG_ROWS:] - base[:-AGG_ROWS] if len(first) > AGG_ROWS else np.array([low + 16])
        high = min(int(later.min()), low + 16)
        if low <= high:
            choices.append(_Choice(base, low, high, wide, ()))
    return choices


def read_choices(stream: Stream, fetch: int) -> list[_Choice]:
    """Ways to bring wide words to the transpose buffer: one fetch a run, or two for each turn of the inner loop."""
    wide = stream.addresses // fetch
    starts, ends, run = _runs(wide)
    first, last = stream.times[starts], stream.times[ends]
    choices = []
    before = np.maximum.accumulate(last)[:-TB_ROWS] - 1 if len(last) > TB_ROWS else None
    tb = run * fetch + stream.addresses % fetch
    for base in _bases(first, wide[starts]):
        high = int((first - 2 - base).min())
        low = int((before - base[TB_ROWS:]).max()) if before is not None else high - 8
        low = max(low, high - 8)
        if low <= high:
            choices.append(_Choice(base, low, high, wide[starts], ("runs", tb)))
    shape = integers(np.stack([stream.times, stream.addresses], axis=1))
    if shape and shape[0]:
        choices += _pairs(stream, fetch, shape[0][0])
    return choices


def _pairs(stream, fetch, inner):
    """Two fetches for every `inner` reads, whether both are needed or not."""
    times, addresses = stream.times.reshape(-1, inner), stream.addresses.reshape(-1, inner)
    base_word = addresses[:, 0] // fetch
    place = addresses - base_word[:, None] * fetch
    if place.min() < 0 or place.max() >= 2 * fetch or len(times) < 2:
        return []
    choices = []
    halves = [place < fetch, place >= fetch]
    first = np.stack([np.where(h, times, _FAR).min(axis=1) for h in halves], axis=1).ravel()
    last = np.stack([np.where(h, times, -_FAR).max(axis=1) for h in halves], axis=1)
    last = np.maximum.accumulate(last, axis=0).ravel()
    for spacing in (1, 2, 3):
        base = (times[:, :1] + np.array([[0, spacing]])).ravel()
        high = int((first - 2 - base).min())
        low = max(int((last[:-2] - 1 - base[2:]).max()), high - 8)
        if low <= high and spacing < np.diff(times[:, 0]).min():
            wide = (base_word[:, None] + np.array([[0, 1]])).ravel()
            choices.append(_Choice(base, low, high, wide, ("pairs", place.ravel())))
    return choices


def plan_pub(uses: list[Use], fetch: int = 4, depth: int = 512) -> dict[str, Controller] | None:
    """Controllers of one tile of the kind `pub` for all `uses`, or None where no schedule was found."""
    steps: list[tuple[int, int | None, list[_Choice]]] = []
    share = len(uses)
    for u, use in enumerate(uses):
        steps.append((u, None, write_choices(use.write, fetch)))
        for r, (_, stream) in enumerate(use.reads):
            steps.append((u, r, read_choices(stream, fetch)))
    if any(not choices for _, _, choices in steps):
        return None
    events_of = {id(c): _events(c.base) for _, _, choices in steps for c in choices}
    chosen: list[tuple] = []
    period = depth // share

    def legal(u, r, choice, events):
        if r is None:
            return True
        _, write, written_at = next((c for k, c in zip(steps, chosen, strict=False) if k[0] == u and k[1] is None))
        size = max(int(choice.wide.max()), int(write.wide.max())) + 1
        there = np.full(size, _FAR)
        there[write.wide] = written_at
        useful = _useful(uses[u].reads[r][1], choice, fetch, len(events))
        if (events[useful] < there[choice.wide[useful]] + 1).any():
            return False
        last = np.full(size, -_FAR)
        np.maximum.at(last, choice.wide[useful], events[useful])
        return not (there[period:] <= last[:-period]).any() if size > period else True

    tried = 0

    def search(step, busy):
        """Choose for the steps from `step` on. busy: cycles of the port that are taken, as bits."""
        nonlocal tried
        if step == len(steps):
            return True
        u, r, choices = steps[step]
        for choice in choices:
            offsets = range(choice.low, choice.high + 1) if r is None else range(choice.high, choice.low - 1, -1)
            first, bits = events_of[id(choice)]
            for offset in offsets:
                tried += 1
                if tried > _BUDGET:
                    return False
                if not bits or first + offset < 0 or busy & bits << first + offset:
                    continue
                events = choice.base + offset
                if not legal(u, r, choice, events):
                    continue
                chosen.append((offset, choice, events))
                if search(step + 1, busy | bits << first + offset):
                    return True
                chosen.pop()
        return False

    if not search(0, 0):
        return None
    return _controllers(uses, steps, chosen, fetch, share)


def _events(base):
    """The first cycle of a schedule, and its cycles from there on as bits; none where they do not rise."""
    first = int(base.min())
    if (np.diff(base) <= 0).any():
        return first, 0
    held = np.zeros(int(base.max()) - first + 1, bool)
    held[base - first] = True
    return first, int.from_bytes(np.packbits(held, bitorder="little").tobytes(), "little")


def _useful(stream, choice, fetch, events):
    """bool [events]: the fetches of which a word is used."""
    live = np.ones(len(stream.times), bool) if stream.live is None else stream.live
    if choice.template[0] == "runs":
        return np.bincount(choice.template[1] // fetch, weights=live, minlength=events) > 0
    useful = np.zeros(events, bool)
    place, live = (a.reshape(events // 2, -1) for a in (choice.template[1], live))
    useful[0::2] = ((place < fetch) & live).any(axis=1)
    useful[1::2] = ((place >= fetch) & live).any(axis=1)
    return useful


def _controllers(uses, steps, chosen, fetch, share):
    made: dict[str, Controller | None] = {}
    port = 0
    for (u, r, _), (_, choice, events) in zip(steps, chosen, strict=True):
        sram = choice.wide * share + u
        if r is None:
            stream = uses[u].write
            _, _, run = _runs(stream.addresses // fetch)
            made[f"in2agg{u}"] = controller(stream.times, agg=run * fetch + stream.addresses % fetch)
            made[f"agg2sram{u}"] = controller(events, agg_row=np.arange(len(events)), sram=sram)
        else:
            stream = uses[u].reads[r][1]
            made[f"sram2tb{port}"] = controller(events, sram=sram, tb_row=np.arange(len(events)))
            tb = choice.template[1]
            # The two rows of the buffer alternate either way; rows that are read backwards step down.
            back = tb % fetch - tb // fetch * fetch
            made[f"tb2out{port}"] = controller(stream.times, tb=tb) or controller(stream.times, tb=back)
            port += 1
    return None if None in made.values() else made


def plan_dp(uses: list[Use], depth: int = 2048) -> dict[str, Controller] | None:
    """Controllers of a dual-port tile: one word written and one read a cycle, the word read is out a cycle later."""
    (use,) = uses
    (_, read), write = use.reads[0], use.write
    live = slice(None) if read.live is None else read.live
    size = int(max(write.addresses.max(), read.addresses[live].max())) + 1
    there, last = np.full(size, _FAR), np.full(size, -_FAR)
    there[write.addresses] = write.times
    fetched = read.times - 1
    if (fetched[live] <= there[read.addresses[live]]).any() or fetched.min() < 0:
        return None
    np.maximum.at(last, read.addresses[live], fetched[live])
    if size > depth and (there[depth:] < last[:-depth]).any():
        return None
    made: dict[str, Any] = {
        "in2sram0": controller(write.times, sram=write.addresses),
        "sram2out0": controller(fetched, sram=read.addresses),
    }
    return None if None in made.values() else made
