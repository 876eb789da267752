"""A mapped program, cycle by cycle: tiles with their controllers, registers and PEs, compiled by numba.

The state of a tile is that of the published one. A conflict on an SRAM port and a word read before it was written are
errors that name cycle and unit. Stalls hold the whole array: they change the time, and nothing else.
"""

import time
from dataclasses import dataclass

import numpy as np

from tilewright.core.compiled import njit
from tilewright.pushmem import dsl
from tilewright.pushmem.errors import ProgramError, RunError
from tilewright.pushmem.mapping import Mapped
from tilewright.pushmem.program import Program

_OPS = {n: k for k, n in enumerate(("+", "-", "*", ">>", "<<", "&", "|", "^", "min", "max", "abs", "bits", "select"))}
_OPS |= {"<": 13, "<=": 14, "==": 15, "!=": 16}
_SIGNED, _CONST, _READ, _LOOP, _LUT, _ADD, _SCALE, _DIV, _MOD, _CUT = 100, 50, 51, 52, 53, 54, 55, 56, 57, 58
# Cycles after the last output in which nothing may go wrong either.
DRAIN = 64
_FAULTS = {
    1: "statement {unit} reads a word that is not there",
    2: "two accesses of the SRAM port of tile {unit}",
    4: "tile {unit} takes a word that is not there",
}


@dataclass(frozen=True)
class Run:
    """outputs: arrays by buffer. cycles: the first to the last output, stalls left out. events: SRAM accesses."""

    outputs: dict[str, np.ndarray]
    last_cycle: int
    wall_cycles: int
    sram_accesses: int
    words: int
    seconds: float


def _code(e, table, loops):
    match e[0]:
        case "const":
            return [(_CONST, e[1], 0)]
        case "read":
            return [(_READ, e[1], 0)]
        case "index":
            return [*_index(e[1], loops), (_CUT, 0, 0)]
        case "lut":
            start = len(table)
            table.extend(e[1])
            return [*_code(e[2], table, loops), (_LUT, start, len(e[1]) - 1)]
    return [c for a in e[2:] for c in _code(a, table, loops)] + [(_OPS[e[0]] + _SIGNED * bool(e[1]), 0, 0)]


def _index(i, loops):
    match i.kind:
        case "var":
            return [(_LOOP, loops.index(i.args[0]), 0)]
        case "const":
            return [(_CONST, i.args[0], 0)]
        case "add":
            return [*_index(i.args[0], loops), *_index(i.args[1], loops), (_ADD, 0, 0)]
    kind = {"mul": _SCALE, "floordiv": _DIV, "mod": _MOD}[i.kind]
    return [*_index(i.args[0], loops), (kind, i.args[1], 0)]


def _recurrence(extents, strides):
    """Steps of a generator when level l advances and all inner levels go back to 0."""
    return [strides[k] - sum((extents[m] - 1) * strides[m] for m in range(k)) for k in range(len(extents))]


def _tables(mapped: Mapped):
    """The mapped program as arrays that numba takes."""
    program, plan = mapped.program, mapped.schedule
    signals: dict[str, int] = {}

    def signal(name):
        return signals.setdefault(name, len(signals))

    inputs = [(signal(n), plan.starts[n], program.buffers[n].shape, plan.strides[n]) for n in program.inputs]
    delays = [(signal(d.source), signal(d.target), d.cycles) for d in mapped.wiring.delays]
    lut: list[int] = [0]
    codes: list = []
    spans: list = []
    wires: list = []
    loops: list = []
    for s in program.statements:
        if s.latency:
            raise ProgramError(f"{s.name}: the simulator runs statements without latency, found {s.latency}")
        begin = len(codes)
        codes += _code(s.expression, lut, s.loops)
        wires_begin = len(wires)
        wires += [signal(mapped.wiring.wires[s.name, k]) for k in range(len(s.reads))]
        reduction = {"": 0, "+": 1, "min": 2, "max": 3}[s.reduction]
        output = program.outputs.index(s.name) if s.name in program.outputs else -1
        spans.append((begin, len(codes), wires_begin, signal(s.name), plan.starts[s.name], s.rank, reduction, output))
        loops.append((s.extents, plan.strides[s.name]))
    generators, tiles = [], []

    def add(tile, name):
        if name not in tile.controllers:
            return -1
        g = tile.controllers[name]
        columns = [g.cycle, *((start, strides) for _, start, strides in g.addresses)]
        generators.append((g.extents, columns))
        return len(generators) - 1

    for tile in mapped.tiles:
        kinds = ("in2agg", "agg2sram", "sram2tb", "tb2out") if tile.memory == "pub" else ("in2sram", "sram2out")
        ids = [add(tile, f"{kind}{p}") for kind in kinds for p in range(2)]
        ids += [-1] * (8 - len(ids))
        sources = [signal(s) for s in tile.sources] + [-1] * (2 - len(tile.sources))
        targets = [signal(s) for s in tile.targets] + [-1] * (2 - len(tile.targets))
        row = [int(tile.memory == "dp"), *ids, *sources, *targets, 0, 0, -1, -1]
        if tile.chain is not None:
            row[13:15] = tile.chain.index, tile.chain.mask
            row[15 : 15 + len(tile.chain.sources)] = map(signal, tile.chain.sources)
        tiles.append(row)

    def table(rows, width):
        return np.array(rows, np.int64).reshape(-1, width)

    depth = 8
    loop_table = np.zeros((max(1, len(inputs) + len(loops)), 2, depth), np.int64)
    loop_table[:, 0] = 1
    for k, (extents, strides) in enumerate([*((shape, strides) for _, _, shape, strides in inputs), *loops]):
        if len(extents) > depth:
            raise ProgramError(f"expected at most {depth} loops, found {len(extents)}")
        if len(extents):
            loop_table[k, 0, -len(extents) :] = extents
            loop_table[k, 1, -len(extents) :] = strides
    generator_table = np.zeros((max(1, len(generators)), 4, 6), np.int64)
    generator_starts = np.zeros((max(1, len(generators)), 3), np.int64)
    for k, (extents, columns) in enumerate(generators):
        generator_table[k, 0, : len(extents)] = extents
        for c, (start, strides) in enumerate(columns):
            generator_starts[k, c] = start
            generator_table[k, c + 1, : len(extents)] = _recurrence(extents, strides)
    return {
        "signals": signals,
        "inputs": table([(s, start) for s, start, _, _ in inputs], 2),
        "delays": table(delays, 3),
        "codes": table(codes, 3),
        "spans": table(spans, 8),
        "loop_counts": np.array([len(s.loops) for s in program.statements], np.int64),
        "wires": np.array([*wires, 0], np.int64),
        "lut": np.array(lut, np.int64),
        "loops": loop_table,
        "tiles": table(tiles, 17),
        "generators": generator_table,
        "starts": generator_starts,
    }


@njit(cache=True, inline="never")
def _signed(word):
    return word - 65536 if word >= 32768 else word


@njit(cache=True)
def _execute(codes, begin, end, wires, first_wire, value, counters, offset, lut, stack):
    top = 0
    for c in range(begin, end):
        op, a, b = codes[c, 0], codes[c, 1], codes[c, 2]
        if op == 50:
            stack[top] = a
            top += 1
            continue
        if op == 51:
            stack[top] = value[wires[first_wire + a]]
            top += 1
            continue
        if op == 52:
            stack[top] = counters[offset + a]
            top += 1
            continue
        if op == 53:
            stack[top - 1] = lut[a + (stack[top - 1] & b)]
            continue
        if op == 54:
            stack[top - 2] += stack[top - 1]
            top -= 1
            continue
        if op == 55:
            stack[top - 1] *= a
            continue
        if op == 56:
            stack[top - 1] //= a
            continue
        if op == 57:
            stack[top - 1] %= a
            continue
        if op == 58:
            stack[top - 1] &= 65535
            continue
        signed = op >= 100
        if signed:
            op -= 100
        if op == 10:
            x = stack[top - 1]
            stack[top - 1] = abs(_signed(x)) & 65535 if signed else x
            continue
        if op == 11:
            continue
        if op == 12:
            stack[top - 3] = stack[top - 2] if stack[top - 3] != 0 else stack[top - 1]
            top -= 2
            continue
        x, y = stack[top - 2], stack[top - 1]
        top -= 1
        sx, sy = (_signed(x), _signed(y)) if signed else (x, y)
        if op == 0:
            r = x + y
        elif op == 1:
            r = x - y
        elif op == 2:
            r = x * y
        elif op == 3:
            r = sx >> (y & 15)
        elif op == 4:
            r = x << (y & 15)
        elif op == 5:
            r = x & y
        elif op == 6:
            r = x | y
        elif op == 7:
            r = x ^ y
        elif op == 8:
            r = min(sx, sy)
        elif op == 9:
            r = max(sx, sy)
        elif op == 13:
            r = 1 if sx < sy else 0
        elif op == 14:
            r = 1 if sx <= sy else 0
        elif op == 15:
            r = 1 if x == y else 0
        else:
            r = 1 if x != y else 0
        stack[top - 1] = r & 65535
    return stack[0]


@njit(cache=True)
def _advance(g, table, counters, values, alive):
    """The next firing of generator `g`."""
    for level in range(6):
        extent = table[g, 0, level]
        if extent == 0:
            break
        if counters[g, level] < extent - 1:
            counters[g, level] += 1
            for c in range(3):
                values[g, c] += table[g, c + 1, level]
            return
        counters[g, level] = 0
    alive[g] = False


@njit(cache=True)
def _fires(g, cycle, values, alive):
    return g >= 0 and alive[g] and (values[g, 0] & 65535) == cycle


@njit(cache=True)
def _give(mine, word, known, before, target, value, there):
    """The word of a tile's output: its own, or, in a chain, that of the tile before, which stands earlier."""
    if mine:
        value[target], there[target] = word, known
    elif before >= 0:
        value[target], there[target] = value[before], there[before]


@njit(cache=True)
def _run(
    cycles,
    stall,
    inputs,
    delays,
    codes,
    spans,
    loop_counts,
    wires,
    lut,
    loops,
    tiles,
    table,
    starts,
    data,
    data_starts,
    signals,
    results,
    result_starts,
    fault,
):
    value, there = np.zeros(signals, np.int64), np.zeros(signals, np.bool_)
    n_in, n_st, n_tiles, n_del, n_gen = len(inputs), len(spans), len(tiles), len(delays), len(table)
    ring_start = np.zeros(n_del + 1, np.int64)
    for d in range(n_del):
        ring_start[d + 1] = ring_start[d] + delays[d, 2]
    ring, ring_there = np.zeros(ring_start[n_del] + 1, np.int64), np.zeros(ring_start[n_del] + 1, np.bool_)
    counters = np.zeros((n_in + n_st) * 8, np.int64)
    next_time = np.zeros(n_in + n_st, np.int64)
    for k in range(n_in):
        next_time[k] = inputs[k, 1]
    for k in range(n_st):
        next_time[n_in + k] = spans[k, 4]
    given, done = np.zeros(n_in, np.int64), np.zeros(n_st, np.int64)
    total = np.zeros(n_st, np.int64)
    generator_counters, values = np.zeros((n_gen, 6), np.int64), starts.copy()
    alive = np.ones(n_gen, np.bool_)
    agg, agg_there = np.zeros((n_tiles, 2, 16), np.int64), np.zeros((n_tiles, 2, 16), np.bool_)
    sram, sram_there = np.zeros((n_tiles, 2048), np.int64), np.zeros((n_tiles, 2048), np.bool_)
    tb, tb_there = np.zeros((n_tiles, 2, 8), np.int64), np.zeros((n_tiles, 2, 8), np.bool_)
    held, held_there = np.zeros((n_tiles, 2, 4), np.int64), np.zeros((n_tiles, 2, 4), np.bool_)
    # Of each row, and of the wide word on its way there, whether it is of this tile of a chain.
    row_own, held_own = np.ones((n_tiles, 2, 2), np.bool_), np.ones((n_tiles, 2), np.bool_)
    for i in range(n_tiles):
        row_own[i] = tiles[i, 14] == 0
    held_row = np.full((n_tiles, 2), -1, np.int64)
    stack = np.zeros(256, np.int64)
    wall, accesses, last = 0, 0, 0
    for t in range(cycles):
        while stall[wall % len(stall)]:
            wall += 1
        wall += 1
        cycle = t & 65535
        for i in range(n_tiles):
            for p in range(2):
                target = tiles[i, 11 + p]
                if target < 0:
                    continue
                there[target] = False
                if tiles[i, 0] == 1:
                    if held_row[i, p] >= 0:
                        _give(
                            held_own[i, p], held[i, p, 0], held_there[i, p, 0], tiles[i, 15 + p], target, value, there
                        )
                        held_row[i, p] = -1
                    continue
                g = tiles[i, 7 + p]
                if _fires(g, cycle, values, alive):
                    word = values[g, 1] & 7
                    mine = row_own[i, p, word // 4]
                    _give(mine, tb[i, p, word], tb_there[i, p, word], tiles[i, 15 + p], target, value, there)
                    _advance(g, table, generator_counters, values, alive)
        for d in range(n_del):
            place = ring_start[d] + t % delays[d, 2]
            value[delays[d, 1]], there[delays[d, 1]] = ring[place], ring_there[place]
        for k in range(n_in + n_st):
            own = inputs[k, 0] if k < n_in else spans[k - n_in, 3]
            there[own] = False
            if next_time[k] != t:
                continue
            if k < n_in:
                value[own], there[own] = data[data_starts[k] + given[k]], True
                given[k] += 1
            else:
                s = k - n_in
                for w in range(spans[s, 2], spans[s + 1, 2] if s + 1 < n_st else len(wires) - 1):
                    if not there[wires[w]]:
                        fault[0], fault[1], fault[2] = 1, t, s
                        return last, wall, accesses
                used = loop_counts[s]
                word = _execute(
                    codes, spans[s, 0], spans[s, 1], wires, spans[s, 2], value, counters, k * 8 + 8 - used, lut, stack
                )
                first, final = True, True
                for level in range(8 - used + spans[s, 5], 8):
                    first = first and counters[k * 8 + level] == 0
                    final = final and counters[k * 8 + level] == loops[k, 0, level] - 1
                if spans[s, 6] and not first:
                    if spans[s, 6] == 1:
                        word = (word + total[s]) & 65535
                    elif spans[s, 6] == 2:
                        word = min(word, total[s])
                    else:
                        word = max(word, total[s])
                total[s] = word
                if final:
                    value[own], there[own] = word, True
                    if spans[s, 7] >= 0:
                        results[result_starts[spans[s, 7]] + done[s]] = word
                        last = t
                    done[s] += 1
            level = 7
            while level >= 0:
                counters[k * 8 + level] += 1
                next_time[k] += loops[k, 1, level]
                if counters[k * 8 + level] < loops[k, 0, level]:
                    break
                next_time[k] -= loops[k, 1, level] * loops[k, 0, level]
                counters[k * 8 + level] = 0
                level -= 1
            if level < 0:
                next_time[k] = -1
        for d in range(n_del):
            place = ring_start[d] + t % delays[d, 2]
            ring[place], ring_there[place] = value[delays[d, 0]], there[delays[d, 0]]
        for i in range(n_tiles):
            if tiles[i, 0] == 1:
                g = tiles[i, 3]
                if _fires(g, cycle, values, alive):
                    a = values[g, 1] & 2047
                    held[i, 0, 0], held_there[i, 0, 0], held_row[i, 0] = sram[i, a], sram_there[i, a], 0
                    held_own[i, 0] = (values[g, 1] >> 11) & tiles[i, 14] == tiles[i, 13]
                    accesses += held_own[i, 0]
                    _advance(g, table, generator_counters, values, alive)
                g = tiles[i, 1]
                if _fires(g, cycle, values, alive):
                    if not there[tiles[i, 9]]:
                        fault[0], fault[1], fault[2] = 4, t, i
                        return last, wall, accesses
                    if (values[g, 1] >> 11) & tiles[i, 14] == tiles[i, 13]:
                        a = values[g, 1] & 2047
                        sram[i, a], sram_there[i, a] = value[tiles[i, 9]], True
                        accesses += 1
                    _advance(g, table, generator_counters, values, alive)
                continue
            busy = 0
            for p in range(2):
                if held_row[i, p] >= 0:
                    row_own[i, p, held_row[i, p]] = held_own[i, p]
                    for lane in range(4):
                        tb[i, p, held_row[i, p] * 4 + lane] = held[i, p, lane]
                        tb_there[i, p, held_row[i, p] * 4 + lane] = held_there[i, p, lane]
                    held_row[i, p] = -1
            for p in range(2):
                g = tiles[i, 5 + p]
                if _fires(g, cycle, values, alive):
                    a = values[g, 1] & 511
                    held_own[i, p] = (values[g, 1] >> 9) & tiles[i, 14] == tiles[i, 13]
                    busy += held_own[i, p]
                    for lane in range(4):
                        held[i, p, lane] = sram[i, a * 4 + lane]
                        held_there[i, p, lane] = sram_there[i, a * 4 + lane]
                    held_row[i, p] = values[g, 2] & 1
                    _advance(g, table, generator_counters, values, alive)
                g = tiles[i, 3 + p]
                if _fires(g, cycle, values, alive):
                    if (values[g, 2] >> 9) & tiles[i, 14] == tiles[i, 13]:
                        busy += 1
                        row, a = values[g, 1] & 3, values[g, 2] & 511
                        for lane in range(4):
                            sram[i, a * 4 + lane] = agg[i, p, row * 4 + lane]
                            sram_there[i, a * 4 + lane] = agg_there[i, p, row * 4 + lane]
                    _advance(g, table, generator_counters, values, alive)
                g = tiles[i, 1 + p]
                if _fires(g, cycle, values, alive):
                    if not there[tiles[i, 9 + p]]:
                        fault[0], fault[1], fault[2] = 4, t, i
                        return last, wall, accesses
                    agg[i, p, values[g, 1] & 15] = value[tiles[i, 9 + p]]
                    agg_there[i, p, values[g, 1] & 15] = True
                    _advance(g, table, generator_counters, values, alive)
            accesses += busy
            if busy > 1:
                fault[0], fault[1], fault[2] = 2, t, i
                return last, wall, accesses
    return last, wall, accesses


def run(mapped: Mapped, data: dict[str, np.ndarray], stalls: np.ndarray | None = None) -> Run:
    """Outputs of `mapped` for the inputs `data` (arrays by the names of the program's inputs).

    stalls: bool array; cycle c of the wall clock stands still where ``stalls[c mod len]``. Raises `RunError`.
    """
    tables = _tables(mapped)
    program = mapped.program
    stalls = np.zeros(1, bool) if stalls is None else np.asarray(stalls, bool)
    if stalls.all():
        raise RunError("stalls in every cycle: the run would never end")
    words = input_words(program, data)
    data_starts = np.cumsum([0, *map(len, words)])
    shapes = [program.buffers[n].shape for n in program.outputs]
    sizes = [int(np.prod(s, dtype=np.int64)) for s in shapes]
    results = np.full(sum(sizes) + 1, -1, np.int64)
    result_starts = np.cumsum([0, *sizes])
    fault = np.zeros(3, np.int64)
    begin = time.perf_counter()
    last, wall, accesses = _run(
        mapped.schedule.last_cycle + 1 + DRAIN, stalls,
        *(tables[n] for n in ("inputs", "delays", "codes", "spans", "loop_counts", "wires", "lut", "loops", "tiles")),
        tables["generators"], tables["starts"],
        np.concatenate([*words, [0]]), data_starts,
        len(tables["signals"]), results, result_starts, fault,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    if fault[0]:
        unit = program.statements[fault[2]].name if fault[0] == 1 else str(fault[2])
        raise RunError(f"cycle {fault[1]}: {_FAULTS[int(fault[0])].format(unit=unit)}")
    if (results[:-1] < 0).any():
        raise RunError(f"{int((results[:-1] < 0).sum())} of {len(results) - 1} output words never came")
    outputs = {
        n: program.as_written(n, results[a : a + size].reshape(shape).astype(np.uint16).view(program.buffers[n].dtype))
        for n, a, size, shape in zip(program.outputs, result_starts[:-1], sizes, shapes, strict=True)
    }
    return Run(outputs, int(last), int(wall), int(accesses), len(results) - 1, seconds)


def input_words(program: Program, data: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The words of each of the program's inputs in the order of time. Raises `ProgramError` for a wrong shape."""
    words = []
    for name in program.inputs:
        source, lane = program.origins[name]
        kept = program.buffers[name].shape
        # All dimensions in space: each copy is one word.
        single = kept == (1,) and np.ndim(data.get(source)) == len(lane)  # type: ignore[arg-type]  # numpy takes None, too
        dimensions = len(lane) + (0 if single else len(kept))
        if source not in data or np.ndim(data[source]) != dimensions:
            raise ProgramError(f"input {source}: expected {dimensions} dimensions, found {data.get(source)!r}")
        place: list = [slice(None)] * dimensions
        for d, v in lane:
            place[d] = v
        part = np.asarray(data[source])[tuple(place)]
        part = part.reshape(kept) if single else part
        if part.shape != kept:
            raise ProgramError(f"input {source}: expected {kept} in time, found {part.shape}")
        words.append(part.astype(np.int64).ravel() & 65535)
    return words


def differing_words(mapped: Mapped, stages, data: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> int:
    """Words of `outputs` that differ from the oracle's."""
    arrays = dsl.evaluate(stages, data)
    wrong = 0
    for name, found in outputs.items():
        source, lane = mapped.program.origins[name]
        place: list = [slice(None)] * arrays[source].ndim
        for d, v in lane:
            place[d] = v
        wrong += int((arrays[source][tuple(place)] != found).sum())
    return wrong
