"""Controllers of a tile, or of a part of it, by bounded model checking of its RTL, see `configure`.

A part takes two steps. A controller's loops and schedule follow from its own firings alone. Addresses
meet in the part's memory: they are asked for with these loops fixed; where that has no answer, with other extents, and
then with more loops. Layers, each least before the next: loops; iterations; steps as stored; starts.

A whole tile is one question: its ports tell when words come in and go out, and all else is open. That takes long; see
`solve` of the package for the tile part by part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from time import perf_counter

import numpy as np

from tilewright.core import deadline
from tilewright.core.errors import SolverError
from tilewright.pushmem import parts, recurrence, rtl
from tilewright.pushmem.configure import btor2, query
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.objectives import Choice, Choices, Least
from tilewright.pushmem.configure.system import Node, System
from tilewright.pushmem.memories import Memory
from tilewright.pushmem.settings import CYCLE, CYCLE_BITS, Configuration
from tilewright.pushmem.streams import ANY, Stream

# What a tile must never do, bits of `_forbidden`: they are no words of a stream.
MET, UNWRITTEN = "two_accesses", "unwritten{}"


@cache
def _system(memory, part):
    """The system of a part or of the ``top``: every register of its controllers is configuration."""
    tile = memory.tile(memory.PARAMETERS) if part == "top" else memory.tile(memory.PARAMETERS, part)
    text = rtl.yosys(rtl.rtlil(tile), rtl.TO_BTOR2, "part.btor2")["part.btor2"]
    system = btor2.read(text, "|".join(tile.configuration), f"{memory.NAME}.{part}")
    # Of a wide word some words may be any: each is an output of its own.
    bits = memory.PARAMETERS.bits
    for signal in tile.told:
        for lane in range(len(signal) // bits):
            numbers = (lane + 1) * bits - 1, lane * bits
            system.nodes.append(Node("slice", bits, (system.outputs[signal.name],), numbers))
            system.outputs[f"{signal.name}[{lane}]"] = len(system.nodes) - 1
    if part == "top":
        _forbidden(system, memory.PARAMETERS)
    return system


def _forbidden(system, parameters):
    """Add as outputs what the model refuses and the RTL lets pass: two accesses in a cycle, and words never written."""

    def bit(op, *args, numbers=()):
        system.nodes.append(Node(op, 1, args, numbers))
        return len(system.nodes) - 1

    met = before = bit("const", numbers=(0,))
    for name in parameters.priority():
        fire = system.outputs[f"{name}_fire"]
        met, before = bit("or", met, bit("and", before, fire)), bit("or", before, fire)
    system.outputs[MET] = met
    for port in range(parameters.outputs):
        # A word that was written is its token and one, never 0.
        shown = bit("redor", system.outputs[f"data_out{port}"])
        system.outputs[UNWRITTEN.format(port)] = bit("and", system.outputs[f"valid_out{port}"], bit("not", shown))


@cache
def _controller(name, levels):
    """The system of a controller's loops and schedule, without addresses."""
    from tilewright.pushmem.memories import _rtl

    alone = _rtl.Alone(name, levels)
    text = rtl.yosys(rtl.rtlil(alone), rtl.TO_BTOR2, "part.btor2")["part.btor2"]
    return btor2.read(text, "|".join(alone.configuration), name)


def solve(
    stream: Stream,
    memory: Memory,
    *,
    depth: int = 4,
    known: Mapping[str, int] | None = None,
    monolithic: bool = False,
    limit_s: float | None = None,
    blank: int | None = None,
) -> tuple["Answers", Configuration | None]:
    """``(answers, configuration)`` of what `stream` is of; the configuration is None where there is none.

    depth: how many layers are made least. known: registers that are fixed. monolithic: loops, schedules and
    addresses are asked for at once; of a whole tile they always are. blank: the word that stands where
    nothing was written; None: one that does not occur. Raises `TilewrightError`.
    """
    end = None if limit_s is None else perf_counter() + limit_s
    blank = _blank(stream, memory) if blank is None else blank
    known, system, part = known or {}, _system(memory, stream.part), stream.part
    firings = parts.firings(stream, memory)
    used = [name for name, at in firings.items() if len(at)]
    inside, spare = _inside(stream, used) if part == "top" else ([], [])
    used += inside + spare
    silent: dict = {}
    ports = memory.PARAMETERS.ports()
    for name in ports:
        if name not in used:
            silent |= {register: 0 for register in system.configuration if register.startswith(f"{name}_")}
    answers = Answers(query.SOLVED)
    found: dict[str, int] = {}
    for name in [] if monolithic or part == "top" else used:
        example, layers = _schedule(name, firings[name], len(stream)), _layers(memory, [name], {name: ()}, depth)
        found |= answers.ask(
            name, _controller(name, memory.PARAMETERS.levels), example, layers, _within(known, name), end
        )
        if answers.verdict != query.SOLVED:
            return answers, None
    told = {name: _told(part, ports[name]) for name in used}
    layers = _layers(memory, used, told, depth, {**found, **known}, spare)
    found = answers.ask(part, system, _example(stream, memory, firings, blank), layers, {**silent, **known}, end)
    if (cause := answers.by_name[part].cause) is not None:
        answers.by_name[part].cause = _in_tokens(cause, memory.PARAMETERS.bits, blank)
    if answers.verdict != query.SOLVED:
        return answers, None
    return answers, recurrence.configuration(recurrence.silent(memory) | found, memory)


@dataclass
class Answers:
    """What was asked in turn. verdict: of all so far. by_name: the answers. seconds: of each."""

    verdict: str
    by_name: dict[str, query.Answer] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def ask(
        self,
        name: str,
        system: System,
        example: Example,
        layers: Sequence[Choices | Least],
        fixed: Mapping[str, int],
        end: float | None,
    ) -> dict[str, int]:
        """The registers of one more answer, as `query.solve` has it; `end` is when the time is over."""
        begin = perf_counter()
        left = deadline.left(end)
        answer = self.by_name[name] = query.solve(system, example, layers=layers, fixed=fixed, limit_s=left)
        self.seconds[name], self.verdict = perf_counter() - begin, answer.verdict
        return answer.registers


def asserted(
    configuration: Configuration, stream: Stream, memory: Memory, *, limit_s: float | None = None
) -> query.Answer:
    """The `query.Answer` to the one question of what `stream` is of, with every register as in `configuration`."""
    firings = parts.firings(stream, memory)
    blank = _blank(stream, memory)
    answer = query.solve(
        _system(memory, stream.part),
        _example(stream, memory, firings, blank),
        fixed=recurrence.registers(configuration, memory),
        limit_s=limit_s,
    )
    if answer.cause is not None:
        answer.cause = _in_tokens(answer.cause, memory.PARAMETERS.bits, blank)
    return answer


def schedules(configuration: Configuration, memory: Memory) -> dict[str, int]:
    """Registers of the loops and schedules of a configuration, without addresses."""
    found = recurrence.registers(configuration, memory)
    return {key: value for name in configuration.controllers for key, value in _within(found, name).items()}


def _within(known, name):
    """Registers of a controller's loops and schedule."""
    first = f"{name}_enable", f"{name}_last", f"{name}_{CYCLE}_"
    return {register: value for register, value in known.items() if register.startswith(first)}


def _schedule(name, at, cycles):
    """The example of a controller that fires so."""
    fires, sums = [0] * cycles, [None] * cycles
    for cycle in at.tolist():
        fires[cycle], sums[cycle] = 1, (cycle - int(at[0])) % (1 << CYCLE_BITS)
    return Example(cycles, {}, {}, {f"{name}_fire": fires, f"{name}.{name}_{CYCLE}_sum": sums})


def _told(part, port):
    """Addresses of a controller that a part tells; the top has them all."""
    return tuple(port.addresses) if part == "top" else parts.TOLD[part][port.kind]


def _inside(stream, used):
    """``(needed, spare)``: controllers inside a tile that have to fire, and those that may be silent as well.

    A word that goes out was fetched, and written from the input that it came in at. All others write and fetch what
    nobody asks for.
    """
    out = set(stream.data_out[stream.valid_out].ravel().tolist())
    came = [set(stream.data_in[valid, port].ravel().tolist()) for port, valid in enumerate(stream.valid_in.T)]
    fetching = [name.replace("tb2out", "sram2tb") for name in used if name.startswith("tb2out")]
    needed: list = []
    spare: list = []
    for name in used:
        if name.startswith("in2agg"):
            port = int(name[len("in2agg") :])
            others = set().union(*came[:port], *came[port + 1 :])
            (needed if out & came[port] - others else spare).append(name.replace("in2agg", "agg2sram"))
    return needed + fetching, spare


def _blank(stream, memory):
    """A word that a stream does not have: in the RTL it is 0, as what was never written. Raises `SolverError`."""
    seen, count = {int(word) for word in np.unique(stream.data_out)}, 1 << memory.PARAMETERS.bits
    if stream.part == "top":
        seen |= {int(word) for word in np.unique(stream.data_in)}
    found = next((word for word in reversed(range(count)) if word not in seen), None)
    if found is None or max(seen) >= count:
        raise SolverError(f"bmc: expected fewer than {count} different words below {count}, found {len(seen - {ANY})}")
    return found


def _example(stream, memory, firings, blank):
    """The example of a part or of the top: firings that it shows are pinned, and so are the sums of their schedules."""
    pins: dict = {}
    cycles, bits, part = len(stream), memory.PARAMETERS.bits, stream.part
    for name, at in firings.items():
        pins |= _schedule(name, at, cycles).pins if len(at) else {f"{name}_fire": [0] * cycles}
        if name.startswith("sram2out"):
            # What it gives in the last cycle would show behind it.
            pins[f"{name}_fire"][-1] = None
    joined = stream.data_in if part != "tb" else stream.data_in[:, :1]
    names = {"agg": "data_in{}", "top": "data_in{}", "sram": "row{}", "tb": "register"}[part]
    inputs = {names.format(port): _words(joined[:, port], bits, blank) for port in range(joined.shape[1])}
    inputs["run"] = [1] * cycles
    given = {"agg": "row{}[{}]", "sram": "register[{1}]"}.get(part, "data_out{}")
    outputs: dict[str, list[int | None]] = {MET: [0] * cycles} if part == "top" else {}
    for port in range(stream.data_out.shape[1]):
        # The read register shows its word in every cycle.
        asked = stream.valid_out[:, port] if part != "sram" else np.ones(cycles, dtype=bool)
        if part == "top":
            outputs[UNWRITTEN.format(port)] = [0 if valid else None for valid in asked.tolist()]
        for lane in range(stream.data_out.shape[2]):
            words = np.where(asked, stream.data_out[:, port, lane], ANY).tolist()
            if any(word != ANY for word in words):
                outputs[given.format(port, lane)] = [
                    None if word == ANY else (word - blank) % (1 << bits) for word in words
                ]
    return Example(cycles, inputs, outputs, pins)


def _words(data, bits, blank):
    """Wide words of data [cycles, words], the first one lowest; 0 is `blank`, and what is not known."""
    shifts = [bits * place for place in range(data.shape[1])]
    data = np.where(data == ANY, 0, (data - blank) % (1 << bits))
    return [sum(word << shift for word, shift in zip(row, shifts, strict=True)) for row in data.tolist()]


def _in_tokens(cause, bits, blank):
    """A cause that tells words as the stream has them."""
    asked = [
        (signal, cycle, (word + blank) % (1 << bits) if signal.startswith(("row", "register", "data_out")) else word)
        for signal, cycle, word in cause.asked
    ]
    return replace(cause, asked=asked)


def _layers(memory, names, told, depth, found=None, spare=()):
    """Layers of the controllers `names`. told: addresses of each that the part tells. found: registers by now. spare:
    names of those that may be silent."""
    levels, groups = memory.PARAMETERS.levels, []
    for name in names:
        every = [CYCLE, *told[name]]
        choices, least = [], 0
        known = {} if found is None else _within(found, name)
        if known:
            least = sum(known[f"{name}_last{level}"] > 0 for level in range(levels))
            choices.append(Choice(least, {**known, **_unused(name, every, least, levels)}, {}))
        if name in spare:
            starts = {f"{name}_{what}_start": 0 for what in every}
            choices.append(Choice(0, {f"{name}_enable": 0, **_unused(name, every, 0, levels), **starts}, {}))
        for count in range(least, levels + 1):
            fixed = {f"{name}_enable": 1, **_unused(name, every, count, levels)}
            choices.append(Choice(count, fixed, {f"{name}_last{level}": 1 for level in range(count)}))
        groups.append(choices)
    steps = [
        [(f"{name}_{what}_step{level}", 0)]
        for name in names
        for what in (CYCLE, *told[name])
        for level in range(levels)
    ]
    all_starts = [[(f"{name}_{what}_start", 0)] for name in names for what in (CYCLE, *told[name])]
    products = [[(f"{name}_last{level}", 1) for level in range(levels)] for name in names]
    # Loops are always as few as there can be: what is enumerated is what makes the question small.
    all_layers = [
        Choices("levels", groups),
        Least("extents", products),
        Least("strides", steps),
        Least("starts", all_starts),
    ]
    return all_layers[: max(1, depth)]


def _unused(name, every, count, levels):
    """Registers of levels that are not used."""
    unused = range(count, levels)
    return {f"{name}_last{level}": 0 for level in unused} | {
        f"{name}_{what}_step{level}": 0 for what in every for level in unused
    }
