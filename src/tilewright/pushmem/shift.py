"""Which reads are wires, which go through registers, and which need memory."""

from dataclasses import dataclass, field

import numpy as np

from tilewright.pushmem import storage
from tilewright.pushmem.errors import CapacityError
from tilewright.pushmem.program import Program
from tilewright.pushmem.rates import loops
from tilewright.pushmem.stencil import Schedule, written
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

    wires: dict[tuple[str, int], str]
    delays: tuple[Delay, ...]
    taps: tuple[Tap, ...]
    uses: tuple[Use, ...]
    layouts: dict[str, storage.Layout] = field(default_factory=dict)


def wire(program: Program, plan: Schedule, fetch: int, capacity: int, threshold: int = REGISTER_THRESHOLD) -> Wiring:
    """Wires, registers and memory streams of all reads.

    fetch: words of a wide word. capacity: words of a tile; a longer distance goes through several tiles in a row.
    Raises `CapacityError` where more words whose distances vary live at once.
    """
    wires, delays, taps, uses, layouts = {}, [], [], [], {}
    statements = {s.name: s for s in program.statements}
    for name, buffer in program.buffers.items():
        edges = [e for e in plan.edges if e.buffer == name]
        strides, offset = written(program, plan.strides, name)
        grid = np.indices(buffer.shape).reshape(len(buffer.shape), -1)
        born = sum((g * k for g, k in zip(grid, strides, strict=True)), np.int64(0)) + plan.starts[name] + offset
        addresses = storage.Layout(storage.LINEAR, (1,), storage.pitches(buffer.shape, fetch), 0).addresses(grid)
        last = np.full(len(born), -1, np.int64)
        streams: dict[str, list] = {}

        def rows_for(group, statements=statements, shape=buffer.shape):
            last = 0
            for e in group:
                s = statements[e.statement]
                i = s.reads[e.read].indices[0]
                corners = {n: x - 1 for n, x in zip(s.loops, s.extents, strict=True)}
                last = max(last, int(i.evaluate(corners)))
            return min(shape[0], last + 1)

        def keep(rows, shape=buffer.shape):
            return rows * int(np.prod(shape[1:], dtype=np.int64))

        fixed: dict[int, list] = {}
        for e in edges:
            low, high = plan.distance(e)
            if low == high:
                fixed.setdefault(low, []).append(e)
        distances = sorted(fixed)
        signal, reached, memory_signal, memory_distance = name, 0, name, 0
        for distance in distances:
            gap = distance - reached
            if gap:
                target = f"{name}@{distance}"
                if gap < threshold:
                    delays.append(Delay(signal, target, gap))
                else:
                    # What follows within the threshold hangs on registers behind this port.
                    follow = [d for d in distances if d >= distance]
                    rows = max(rows_for(fixed[d]) for d in follow)
                    per_word = max(1, strides[-1] if strides else 1)
                    while (distance - memory_distance) > (capacity - 4 * fetch) * per_word:
                        middle = memory_distance + (capacity - 8 * fetch) * per_word
                        hop = f"{name}@{middle}"
                        _tap(streams, taps, Tap(name, memory_signal, hop, middle, rows), born, addresses, keep(rows))
                        memory_signal, memory_distance = hop, middle
                    source = memory_signal if distance - 0 > (capacity - 4 * fetch) * per_word else name
                    _tap(streams, taps, Tap(name, source, target, distance, rows), born, addresses, keep(rows))
                    memory_signal, memory_distance = target, distance
                signal, reached = target, distance
            for e in fixed[distance]:
                wires[e.statement, e.read] = signal
        for tap in taps:
            if tap.buffer == name:
                last[: keep(tap.rows)] = np.maximum(last[: keep(tap.rows)], born[: keep(tap.rows)] + tap.distance)
        varying = [e for e in edges if plan.distance(e)[0] != plan.distance(e)[1]]
        asked = []
        for e in varying:
            s = statements[e.statement]
            extents = loops(s, fetch)
            place = np.indices(extents).reshape(len(extents), -1)
            live = np.all([g < e for g, e in zip(place, s.extents, strict=True)], axis=0)
            values = dict(zip(s.loops, place, strict=True))
            times = (
                sum((g * k for g, k in zip(place, plan.strides[s.name], strict=True)), np.int64(0))
                + plan.starts[s.name]
            )
            indices = [np.broadcast_to(i.evaluate(values), times.shape) for i in s.reads[e.read].indices]
            asked.append((e, times, indices, live))
            inside = np.ravel_multi_index([i[live] for i in indices], buffer.shape) if buffer.shape else 0
            np.maximum.at(last, inside, times[live])
        read = last >= 0
        if streams or varying:
            layouts[name] = storage.layout(
                buffer.shape, [g[read] for g in grid], born[read], last[read], fetch, capacity
            )
        if varying and layouts[name].size > capacity:
            kept = layouts[name]
            raise CapacityError(
                f"{name}: {kept.live} words live at once and need {kept.size} places; a tile has {capacity}"
            )
        known: dict[bytes, str] = {}
        for e, times, indices, live in asked:
            where, place = layouts[name].addresses(indices), layouts[name].addresses(grid)
            key = times.tobytes() + where.tobytes()
            if key not in known:
                known[key] = f"{name}.{len(known)}"
                streams.setdefault(name, []).append((known[key], Stream(times, where, live), Stream(born, place)))
            wires[e.statement, e.read] = known[key]
        for source, reads in streams.items():
            write = max((w for _, _, w in reads), key=lambda w: len(w.times))
            uses.append(Use(name, source, write, tuple((target, r) for target, r, _ in reads)))
    return Wiring(wires, tuple(delays), tuple(taps), tuple(uses), layouts)


def _tap(streams, taps, tap, born, addresses, words):
    source_delay = 0
    for other in taps:
        if other.target == tap.source:
            source_delay = other.distance
    taps.append(tap)
    write = Stream(born[:words] + source_delay, addresses[:words])
    read = Stream(born[:words] + tap.distance, addresses[:words])
    streams.setdefault(tap.source, []).append((tap.target, read, write))
