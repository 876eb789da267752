"""A whole mapped program in RTL: one tile module, instanced by name, with registers and PEs around it.

The tile's module compiles once, whatever the number of tiles. CXXRTL and g++ make a library of the design, see `rtl`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.pushmem import recurrence, reference, rtl, settings
from tilewright.pushmem.configuration import configurations, place
from tilewright.pushmem.errors import RunError, need
from tilewright.pushmem.mapping import Mapped
from tilewright.pushmem.program import by_indices
from tilewright.pushmem.simulate import input_words
from tilewright.pushmem.streams import DRAIN

_TILE, _CHAINED = "push_tile", "push_tile_of_a_chain"
# What inputs carry where no word is due: a word that shows in a result if it is taken.
_JUNK = 0xA5A5


@dataclass(frozen=True)
class Netlist:
    """text: RTLIL whose top is ``tile``. inputs, outputs: names of its ports."""

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def netlist(mapped: Mapped) -> Netlist:
    """The design of `mapped`. Raises `Unavailable` without the extra."""
    need("amaranth")
    if not mapped.tiles:
        top = _top(mapped, {})
        return Netlist(rtl.rtlil(top), top.inputs, top.outputs)
    from amaranth.back import rtlil as writer

    widths, parts = {}, []
    for name, memory in {_module(t): t.member for t in mapped.tiles}.items():
        tile = memory.tile(memory.PARAMETERS)
        part = writer.convert(tile, name=name, ports=tile.ports, emit_src=False)
        widths[name] = {register: len(signal) for register, signal in tile.configuration.items()}
        # Flattening then goes around the tile, and C++ gets one class for all instances of it.
        marked = part.replace(f"module \\{name}\n", f"attribute \\keep_hierarchy 1\nmodule \\{name}\n", 1)
        # Modules inside get the name of the one around them.
        parts.append(marked.replace("attribute \\top 1\n", ""))
    top = _top(mapped, widths)
    return Netlist("\n".join([rtl.rtlil(top), *parts]), top.inputs, top.outputs)


def _module(tile):
    """The name of a tile's module."""
    return _TILE if tile.chain is None else _CHAINED


def build(mapped: Mapped) -> rtl.Library:
    """The design as a library. Raises `Unavailable` without the extra or g++."""
    made = netlist(mapped)
    return rtl.Library(made.text, ["rst"], made.inputs, made.outputs)


def run(mapped: Mapped, data: dict[str, np.ndarray], stalls: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Outputs of the RTL by buffer, as `simulate.run` gives them. Raises `RunError` where words are missing."""
    program, plan = mapped.program, mapped.schedule
    cycles = plan.last_cycle + 1 + DRAIN
    words = input_words(program, data)
    given = np.full((cycles, 1 + len(program.inputs)), _JUNK, np.uint64)
    given[:, 0] = 1
    for k, name in enumerate(program.inputs, 1):
        times = plan.times(name, program.buffers[name].shape).ravel()
        inside = times < cycles
        given[times[inside], k] = words[k - 1][inside]
    if stalls is not None:
        pattern = np.resize(np.asarray(stalls, bool), 4 * cycles + len(stalls))
        walls = np.flatnonzero(~pattern)[:cycles]
        held = np.full((int(walls[-1]) + 1, given.shape[1]), _JUNK, np.uint64)
        held[:, 0] = 0
        held[walls] = given
        given = held
    out = build(mapped).run({"rst": 0}, given)
    results = {}
    for k, name in enumerate(program.outputs):
        buffer = program.buffers[name]
        found = out[out[:, 2 * k + 1] == 1, 2 * k]
        if len(found) != np.prod(buffer.shape, dtype=np.int64):
            raise RunError(f"RTL: expected {np.prod(buffer.shape)} words of {name}, found {len(found)}")
        results[name] = program.as_written(name, reference.stored(found, buffer.dtype).reshape(buffer.shape))
    return results


def _top(mapped, widths):
    """The array. widths: by module, bits of each register of a tile's configuration."""
    from amaranth.hdl import Array, C, ClockSignal, Elaboratable, Instance, Module, Mux, ResetSignal, Signal

    from tilewright.pushmem.memories._rtl import Controller

    program, plan = mapped.program, mapped.schedule
    signals: dict[str, Signal] = {}

    def signal(name):
        if name not in signals:
            signals[name] = Signal(16, name=f"w{len(signals)}")
        return signals[name]

    class Top(Elaboratable):
        def __init__(self):
            self.run = Signal(name="run")
            self.words_in = [Signal(16, name=f"in{k}") for k in range(len(program.inputs))]
            self.words_out = [Signal(16, name=f"out{k}") for k in range(len(program.outputs))]
            self.valid = [Signal(name=f"valid{k}") for k in range(len(program.outputs))]
            pairs = [p for pair in zip(self.words_out, self.valid, strict=True) for p in pair]
            self.ports = [self.run, *self.words_in, *pairs]
            self.inputs = ("run", *(s.name for s in self.words_in))
            self.outputs = tuple(s.name for s in pairs)

        def elaborate(self, _platform):
            m = Module()
            cycle = Signal(16, name="cycle")
            with m.If(self.run):
                m.d.sync += cycle.eq(cycle + 1)
            for name, word in zip(program.inputs, self.words_in, strict=True):
                m.d.comb += signal(name).eq(word)
            for d in mapped.wiring.delays:
                before = signal(d.source)
                for k in range(d.cycles):
                    after = Signal(16, name=f"{signal(d.target).name}_{k}")
                    with m.If(self.run):
                        m.d.sync += after.eq(before)
                    before = after
                m.d.comb += signal(d.target).eq(before)
            for number, (tile, configuration) in enumerate(zip(mapped.tiles, configurations(mapped), strict=True)):
                memory, module = tile.member, _module(tile)
                values = recurrence.registers(configuration, memory) | place(tile)
                ports = {f"i_{n}": C(values[n], bits) for n, bits in widths[module].items()}
                ports |= {"i_run": self.run, "i_clk": ClockSignal(), "i_rst": ResetSignal()}
                for p in range(memory.PARAMETERS.inputs):
                    ports[f"i_data_in{p}"] = signal(tile.sources[p]) if p < len(tile.sources) else C(0, 16)
                if tile.chain is not None:
                    before = [signal(s) for s in tile.chain.sources]
                    for p in range(memory.PARAMETERS.outputs):
                        ports[f"i_chain_in{p}"] = before[p] if p < len(before) else C(0, 16)
                for p, target in enumerate(tile.targets):
                    ports[f"o_data_out{p}"] = signal(target)
                m.submodules[f"tile{number}"] = Instance(module, **ports)
            for s in program.statements:
                self._statement(m, s, cycle)
            return m

        def _statement(self, m, s, cycle):
            control = Controller(f"pe_{s.name}", {n: 16 for n in s.loops}, max(1, len(s.loops)))
            m.submodules[f"pe_{s.name}"] = control
            m.d.comb += [control.run.eq(self.run), control.cycle.eq(cycle)]
            inner = list(reversed(range(len(s.loops))))
            extents = [s.extents[d] for d in inner] or [1]
            columns = {"cycle": (plan.starts[s.name], [plan.strides[s.name][d] for d in inner] or [0], 16)}
            for n, loop in enumerate(s.loops):
                columns[loop] = (0, [int(d == n) for d in inner] or [0], 16)
            stated = {f"{control.name}_enable": 1}
            for level, extent in enumerate(extents):
                stated[f"{control.name}_last{level}"] = extent - 1
            for what, (start, strides, bits) in columns.items():
                affine = settings.Affine(start, tuple(strides))
                stated[f"{control.name}_{what}_start"] = start & ((1 << bits) - 1)
                for level, step in enumerate(recurrence.steps(extents, affine, bits)):
                    stated[f"{control.name}_{what}_step{level}"] = step
            m.d.comb += [control.configuration[n].eq(v) for n, v in stated.items()]
            loops = {n: control.values[n] for n in s.loops}
            reads = [signal(mapped.wiring.wires[s.name, k]) for k in range(len(s.reads))]
            word = Signal(16, name=f"word_{s.name}")
            m.d.comb += word.eq(self._value(m, s.expression, reads, loops, {}))
            final = C(1, 1)
            if s.reduction:
                first = C(1, 1)
                for name, extent in zip(s.loops[s.rank :], s.extents[s.rank :], strict=True):
                    first = first & (loops[name] == 0)
                    final = final & (loops[name] == extent - 1)
                total, result = Signal(16, name=f"sum_{s.name}"), Signal(16, name=f"result_{s.name}")
                less = word.as_signed() < total.as_signed() if s.signed else word < total
                joined = {"+": (word + total)[:16], "min": Mux(less, word, total), "max": Mux(less, total, word)}
                m.d.comb += result.eq(Mux(first, word, joined[s.reduction]))
                with m.If(control.fire):
                    m.d.sync += total.eq(result)
                word = result
            m.d.comb += signal(s.name).eq(word)
            if s.name in program.outputs:
                k = program.outputs.index(s.name)
                m.d.comb += [self.words_out[k].eq(word), self.valid[k].eq(control.fire & final)]

        def _value(self, m, e, reads, loops, known):
            if not by_indices(e):
                return self._made(m, e, reads, loops, known)
            if e not in known:
                known[e] = self._made(m, e, reads, loops, known)
            return known[e]

        def _made(self, m, e, reads, loops, known):
            # Every operation has a wire of its own, so that texts stay short where a result is used twice.
            result = Signal(16)
            match e[0]:
                case "const":
                    return C(e[1], 16)
                case "read":
                    return reads[e[1]]
                case "index":
                    m.d.comb += result.eq(e[1].evaluate({name: value.as_signed() for name, value in loops.items()}))
                    return result
                case "lut":
                    place = self._value(m, e[2], reads, loops, known) & (len(e[1]) - 1)
                    m.d.comb += result.eq(Array(C(v, 16) for v in e[1])[place[: (len(e[1]) - 1).bit_length()]])
                    return result
            args = [self._value(m, a, reads, loops, known) for a in e[2:]]
            x: Any = args[0]
            y: Any = args[1] if len(args) > 1 else None
            sx, sy = (x.as_signed(), y.as_signed() if y is not None else None) if e[1] else (x, y)
            made = {
                "+": lambda: x + y,
                "-": lambda: x - y,
                "*": lambda: x * y,
                "high": lambda: (x * y)[16:],
                ">>": lambda: sx >> y[:4],
                "<<": lambda: x << y[:4],
                "&": lambda: x & y,
                "|": lambda: x | y,
                "^": lambda: x ^ y,
                "min": lambda: Mux(sx < sy, x, y),
                "max": lambda: Mux(sx < sy, y, x),
                "abs": lambda: Mux(sx < 0, -sx, sx) if e[1] else x,
                "bits": lambda: x,
                "select": lambda: Mux(x != 0, y, args[2]),
                "<": lambda: sx < sy,
                "<=": lambda: sx <= sy,
                "==": lambda: x == y,
                "!=": lambda: x != y,
            }[e[0]]()
            m.d.comb += result.eq(made)
            return result

    return Top()
