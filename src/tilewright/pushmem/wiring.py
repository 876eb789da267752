"""Which reads are wires, which go through registers, and which need memory.

A constant distance from write to read becomes registers, or, from a threshold on, a *tap*: a tile that repeats the
buffer so much later. Reads whose distances vary ask a tile, or a chain of tiles, for the words by address.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tilewright.pushmem import storage
from tilewright.pushmem.errors import CapacityError
from tilewright.pushmem.program import Program
from tilewright.pushmem.rates import loops
from tilewright.pushmem.schedule import Edge, Schedule, written
from tilewright.pushmem.vectorise import Stream, Use

REGISTER_THRESHOLD = 16


@dataclass(frozen=True)
class Delay:
    """Registers in a row: `target` is `source` `cycles` cycles ago."""

    source: str
    target: str
    cycles: int


@dataclass(frozen=True)
class Tap:
    """A memory port that repeats a buffer `distance` cycles after each write, up to row `rows`."""

    buffer: str
    source: str
    target: str
    distance: int
    rows: int


@dataclass(frozen=True)
class Wiring:
    """The signal of every read, and what makes it. layouts: of the buffers that memory keeps."""

    wires: dict[tuple[str, int], str] = field(default_factory=dict)
    delays: list[Delay] = field(default_factory=list)
    taps: list[Tap] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    layouts: dict[str, storage.Layout] = field(default_factory=dict)


def wire(
    program: Program,
    plan: Schedule,
    fetch: int,
    capacity: int,
    threshold: int = REGISTER_THRESHOLD,
    most: int = 1,
) -> Wiring:
    """Wires, registers and memory streams of all reads.

    fetch: words of a wide word. capacity: words of a tile; a longer distance goes through several tiles in a row.
    most: tiles of a chain that may keep a buffer whose distances vary. Raises `CapacityError` where more words of one
    live at once.
    """
    made, known = Wiring(), _Known({}, {})
    for name in program.buffers:
        buffer = _Buffer(program, plan, name, fetch, known)
        buffer.repeated(made, threshold, capacity)
        buffer.stored(made, capacity, most)
        made.uses.extend(buffer.uses())
    return made


@dataclass(frozen=True)
class _Known:
    """What buffers that are read alike share. reads: cycles after the start of a statement, addresses, and those that
    are used. layouts: by addresses and cycles."""

    reads: dict[tuple, tuple[np.ndarray, np.ndarray, np.ndarray]]
    layouts: dict[tuple, storage.Layout]


class _Buffer:
    """A buffer's words, by the cycle in which each is there, and the streams that memory takes of it."""

    def __init__(self, program: Program, plan: Schedule, name: str, fetch: int, known: _Known):
        self.program, self.plan, self.name, self.fetch, self.known = program, plan, name, fetch, known
        self.shape = program.buffers[name].shape
        self.strides, offset = written(program, plan.strides, name)
        grid = np.indices(self.shape).reshape(len(self.shape), -1)
        steps = sum((g * k for g, k in zip(grid, self.strides, strict=True)), np.int64(0))
        self.born = np.asarray(steps + plan.starts[name] + offset)
        self.addresses = self.linear(grid)
        self.fixed: dict[int, list[Edge]] = {}
        self.asked: list[Edge] = []
        for edge in plan.edges:
            if edge.buffer == name:
                low, high = plan.distance(edge)
                (self.fixed.setdefault(low, []) if low == high else self.asked).append(edge)
        # By signal, what is written and what is read: ``(target, read, write)``. chain: tiles that keep the buffer.
        self.streams: dict[str, list[tuple[str, Stream, Stream]]] = {}
        self.chain = 1

    def linear(self, indices: Iterable[np.ndarray]) -> np.ndarray:
        """Addresses of words; rows begin with a wide word."""
        pitch = storage.pitches(self.shape, self.fetch)
        return np.asarray(sum((i * k for i, k in zip(indices, pitch, strict=True)), np.int64(0)))

    def repeated(self, made: Wiring, threshold: int, capacity: int) -> None:
        """Wires of reads at constant distances, with their registers and taps."""
        per_word = max(1, self.strides[-1] if self.strides else 1)
        reach = (capacity - 4 * self.fetch) * per_word
        signal, reached, memory_signal, memory_distance = self.name, 0, self.name, 0
        for distance in sorted(self.fixed):
            target = signal if distance == reached else f"{self.name}@{distance}"
            if 0 < distance - reached < threshold:
                made.delays.append(Delay(signal, target, distance - reached))
            elif distance > reached:
                # What follows within the threshold hangs on registers behind this port.
                rows = max(self._rows(edges) for d, edges in self.fixed.items() if d >= distance)
                while distance - memory_distance > reach:
                    middle = memory_distance + (capacity - 8 * self.fetch) * per_word
                    hop = f"{self.name}@{middle}"
                    self._tap(made, Tap(self.name, memory_signal, hop, middle, rows))
                    memory_signal, memory_distance = hop, middle
                source = memory_signal if distance > reach else self.name
                self._tap(made, Tap(self.name, source, target, distance, rows))
                memory_signal, memory_distance = target, distance
            signal, reached = target, distance
            for edge in self.fixed[distance]:
                made.wires[edge.statement, edge.read] = signal

    def _rows(self, edges: list[Edge]) -> int:
        """Rows up to the last one that is read."""
        last = 0
        for edge in edges:
            s = self.program.statement(edge.statement)
            rows = s.asked(edge.read, s.reads[edge.read].indices[0].evaluate(s.grid))
            last = max(last, int(rows.max()))
        return min(self.shape[0], last + 1)

    def _words(self, rows: int) -> int:
        return rows * int(np.prod(self.shape[1:], dtype=np.int64))

    def _tap(self, made: Wiring, tap: Tap) -> None:
        late = max([0, *(other.distance for other in made.taps if other.target == tap.source)])
        made.taps.append(tap)
        born, addresses = self.born[: self._words(tap.rows)], self.addresses[: self._words(tap.rows)]
        streams = tap.target, Stream(born + tap.distance, addresses), Stream(born + late, addresses)
        self.streams.setdefault(tap.source, []).append(streams)

    def stored(self, made: Wiring, capacity: int, most: int) -> None:
        """The layout of what memory keeps, and wires of reads whose distances vary. Raises `CapacityError`."""
        if not self.asked and not self.streams:
            return
        last = np.full(len(self.born), -1, np.int64)
        for tap in (tap for tap in made.taps if tap.buffer == self.name):
            words = self._words(tap.rows)
            last[:words] = np.maximum(last[:words], self.born[:words] + tap.distance)
        reads = [self._read(edge) for edge in self.asked]
        place = np.empty(int(self.addresses.max(initial=0)) + 1, np.int64)
        place[self.addresses] = np.arange(len(self.addresses))
        for read in reads:
            np.maximum.at(last, place[read.addresses[read.live]], read.times[read.live])
        kept = last >= 0
        live = self.addresses[kept], self.born[kept] - self.born[0], last[kept] - self.born[0]
        layout = made.layouts[self.name] = _once(
            self.known.layouts, tuple(x.tobytes() for x in live), lambda: storage.layout(*live)
        )
        self.chain = storage.tiles(layout.size, len(place), capacity) if self.asked else 1
        if self.chain > most:
            there = f"a tile has {capacity}" if most == 1 else f"the array has {most} tiles of {capacity}"
            raise CapacityError(
                f"{self.name}: {layout.live} words live at once and need {layout.size} places, {self.chain} tiles; "
                f"{there}"
            )
        write = Stream(self.born, self.addresses)
        # Reads of one word in all cycles are one port.
        known: dict[bytes, tuple[str, Stream]] = {}
        for edge, read in zip(self.asked, reads, strict=True):
            key = read.times.tobytes() + read.addresses.tobytes()
            signal, other = known.get(key, (f"{self.name}.{len(known)}", read))
            known[key] = signal, replace(read, live=np.asarray(read.live) | np.asarray(other.live))
            made.wires[edge.statement, edge.read] = signal
        self.streams.setdefault(self.name, []).extend((signal, read, write) for signal, read in known.values())

    def _read(self, edge: Edge) -> Stream:
        s = self.program.statement(edge.statement)
        indices, asked, extents = s.reads[edge.read].indices, s.needed[edge.read], loops(s, self.fetch)

        def found():
            place = np.indices(extents).reshape(len(extents), -1)
            live = np.all([g < e for g, e in zip(place, s.extents, strict=True)], axis=0)
            if asked is not None:
                live[live] = asked.ravel()
            values = dict(zip(s.loops, place, strict=True))
            times = self.plan.times(s.name, extents).ravel() - self.plan.starts[s.name]
            return times, self.linear(i.evaluate(values) for i in indices) + 0 * times, live

        of_asked = None if asked is None else asked.tobytes()
        key = s.loops, s.extents, extents, self.plan.strides[s.name], indices, of_asked, self.shape
        times, addresses, live = _once(self.known.reads, key, found)
        return Stream(times + self.plan.starts[s.name], addresses, live)

    def uses(self) -> Iterable[Use]:
        """What tiles are asked for."""
        for source, reads in self.streams.items():
            write = max((w for _, _, w in reads), key=lambda w: len(w.times))
            chain = self.chain if source == self.name else 1
            yield Use(self.name, source, write, tuple((target, read) for target, read, _ in reads), chain)


def _once(known, key, make):
    """What `known` holds of `key`, made where it holds nothing."""
    if key not in known:
        known[key] = make()
    return known[key]
