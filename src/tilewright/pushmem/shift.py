"""Which reads are wires, which go through registers, and which need memory."""

from dataclasses import dataclass, field

import numpy as np

from tilewright.pushmem import storage
from tilewright.pushmem.banks import Bank, bank
from tilewright.pushmem.errors import CapacityError
from tilewright.pushmem.program import Program
from tilewright.pushmem.rates import loops
from tilewright.pushmem.stencil import Edge, Schedule, written
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
    """The signal of every read, and what makes it. layouts: of the buffers, or of their banks, that memory keeps."""

    wires: dict[tuple[str, int], str]
    delays: tuple[Delay, ...]
    taps: tuple[Tap, ...]
    uses: tuple[Use, ...]
    layouts: dict[str, storage.Layout] = field(default_factory=dict)
    banks: tuple[Bank, ...] = ()


def wire(
    program: Program,
    plan: Schedule,
    fetch: int,
    capacity: int,
    threshold: int = REGISTER_THRESHOLD,
    banked: bool = False,
    most: int = 1,
) -> Wiring:
    """Wires, registers and memory streams of all reads.

    fetch: words of a wide word. capacity: words of a tile; a longer distance goes through several tiles in a row.
    banked: whether reads of one cycle go to banks where each asks one bank alone; else every two have all words.
    most: tiles of a chain that may keep a buffer whose distances vary. Raises `CapacityError` where more words of one
    live at once.
    """
    wires: dict = {}
    delays: list = []
    taps: list = []
    uses: list = []
    layouts: dict = {}
    found_banks: list[Bank] = []
    statements = {s.name: s for s in program.statements}
    for name, buffer in program.buffers.items():
        edges = [e for e in plan.edges if e.buffer == name]
        strides, offset = written(program, plan.strides, name)
        grid = np.indices(buffer.shape).reshape(len(buffer.shape), -1)
        steps = sum((g * k for g, k in zip(grid, strides, strict=True)), np.int64(0))
        born = np.asarray(steps + plan.starts[name] + offset)
        addresses = storage.Layout(storage.LINEAR, (1,), storage.pitches(buffer.shape, fetch), 0).addresses(grid)
        last = np.full(len(born), -1, np.int64)
        streams: dict[str, list] = {}
        chains: dict[str, int] = {}

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
        asked = [
            _asked(program, plan, statements[e.statement], e, fetch) for e in edges if len({*plan.distance(e)}) > 1
        ]
        for group in _groups(program, plan, name, asked, banked, found_banks):
            inside = group.inside(grid)
            if not asked and not streams:
                continue
            until = _last(group.asked, buffer.shape, last)
            read = inside & (until >= 0)
            words = group.local([g[read] for g in grid])
            # A chain wraps as a tile does: linear addresses stay affine.
            free = capacity * (most if asked else 1)
            kept = storage.layout(group.shape(buffer.shape), words, born[read], until[read], fetch, free)
            layouts[group.name] = kept
            write = Stream(born[inside], kept.addresses(group.local([g[inside] for g in grid])))
            tiles = storage.tiles(kept, int(write.addresses.max(initial=0)) + 1, capacity) if asked else 1
            if tiles > most:
                there = f"a tile has {capacity}" if most == 1 else f"the array has {most} tiles of {capacity}"
                raise CapacityError(
                    f"{group.name}: {kept.live} words live at once and need {kept.size} places, {tiles} tiles; {there}"
                )
            if tiles > 1:
                chains[group.name] = tiles
            # Streams of one buffer share its words where all of them have the same addresses.
            shared = name if kept.kind == storage.LINEAR and group.name == name else group.name + " "
            known: dict[bytes, str] = {}
            for each in group.asked:
                where = kept.addresses(group.local(each.indices))
                key = each.times.tobytes() + where.tobytes()
                if key not in known:
                    known[key] = f"{group.name}.{len(known)}"
                    streams.setdefault(shared, []).append((known[key], Stream(each.times, where, each.live), write))
                wires[each.edge.statement, each.edge.read] = known[key]
        for source, reads in streams.items():
            write = max((w for _, _, w in reads), key=lambda w: len(w.times))
            signal = name if source.endswith(" ") else source
            chain = chains.get(source.rstrip(" "), 1)
            uses.append(Use(name, signal, write, tuple((target, r) for target, r, _ in reads), chain))
    return Wiring(wires, tuple(delays), tuple(taps), tuple(uses), layouts, tuple(found_banks))


@dataclass(frozen=True)
class _Asked:
    """A read whose distances vary: its cycles, indices by dimension, and which iterations count."""

    edge: Edge
    times: np.ndarray
    indices: list[np.ndarray]
    live: np.ndarray


def _asked(program, plan, statement, edge, fetch) -> _Asked:
    extents = loops(statement, fetch)
    place = np.indices(extents).reshape(len(extents), -1)
    live = np.all([g < e for g, e in zip(place, statement.extents, strict=True)], axis=0)
    values = dict(zip(statement.loops, place, strict=True))
    steps = zip(place, plan.strides[statement.name], strict=True)
    times = sum((g * k for g, k in steps), np.int64(0)) + plan.starts[statement.name]
    indices = [np.broadcast_to(i.evaluate(values), times.shape) for i in statement.reads[edge.read].indices]
    return _Asked(edge, times, indices, live)


@dataclass(frozen=True)
class _Group:
    """Reads that share the words of a buffer, or of bank `number` of it."""

    name: str
    asked: list[_Asked]
    bank: Bank | None = None
    number: int = 0

    def inside(self, grid) -> np.ndarray:
        """bool: which words it holds."""
        return (
            np.ones(len(grid[0]) if len(grid) else 1, bool) if self.bank is None else self.bank.of(grid) == self.number
        )

    def local(self, indices):
        """Indices within the group: a bank divides those of its dimension."""
        if self.bank is None:
            return indices
        return [i // self.bank.count if d == self.bank.folded else i for d, i in enumerate(indices)]

    def shape(self, shape):
        """The box of `local` indices."""
        if self.bank is None:
            return shape
        return tuple(-(-e // self.bank.count) if d == self.bank.folded else e for d, e in enumerate(shape))


def _groups(program, plan, name, asked, banked, found) -> list[_Group]:
    """The reads of a buffer by bank, if `banked` and if each of them asks one bank alone; else all together."""
    # Reads of one word in all cycles are one port.
    alike: dict[bytes, tuple[str, int]] = {}
    ports = []
    for each in asked if banked else ():
        key = b"".join(a.tobytes() for a in (each.times, *each.indices))
        ports.append(alike.setdefault(key, (each.edge.statement, each.edge.read)))
    if len(alike) > 1:
        made = bank(program, plan, name, list(alike.values()))
        number = dict(made.ports)
        if made.count > 1 and made.folded is not None and len(number) == len(alike):
            found.append(made)
            return [
                _Group(f"{name}#{b}", [a for a, p in zip(asked, ports, strict=True) if number[p] == b], made, b)
                for b in sorted({*number.values()})
            ]
    return [_Group(name, asked)]


def _last(asked, shape, last) -> np.ndarray:
    """Last reads: those of `last` and of the reads `asked`."""
    last = last.copy()
    for each in asked:
        inside = np.ravel_multi_index([i[each.live] for i in each.indices], shape) if shape else 0
        np.maximum.at(last, inside, each.times[each.live])
    return last


def _tap(streams, taps, tap, born, addresses, words):
    source_delay = 0
    for other in taps:
        if other.target == tap.source:
            source_delay = other.distance
    taps.append(tap)
    write = Stream(born[:words] + source_delay, addresses[:words])
    read = Stream(born[:words] + tap.distance, addresses[:words])
    streams.setdefault(tap.source, []).append((tap.target, read, write))
