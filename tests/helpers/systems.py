"""A builder of systems; small ones, and what each of them gives under each of its at most 2**12 configurations.

The latter is written in numpy, by itself: it shares nothing with the interpreter or the solver.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilewright.pushmem.configure import explain, words
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.objectives import Choice, Choices, Least
from tilewright.pushmem.configure.solve import SAT, UNSAT, Solver
from tilewright.pushmem.configure.system import Node, State, System
from tilewright.pushmem.configure.unroll import Unrolled

CYCLES = 18
# Counts `by_step` a cycle from `by_start` while `go`.
COUNTER = """
1 sort bitvec 1
2 sort bitvec 8
3 input 1 go
4 input 2 by_start
5 input 2 by_step
6 state 2 moved
7 zero 2
8 init 2 6 7
9 add 2 6 5
10 ite 2 3 9 6
11 next 2 6 10
12 add 2 6 4
13 output 12 value
"""


def checked(system: System, example: Example, found: explain.Cause, fixed: Mapping[str, int] | None = None) -> bool:
    """Whether a cause has no configuration, and each set with one thing less has one."""

    def result(asked):
        columns = {name: [None] * example.cycles for name, _, _ in asked}
        for name, cycle, word in asked:
            columns[name][cycle] = word
        solver = Solver()
        unrolled = Unrolled(system, Example(example.cycles, example.inputs, columns), solver, fixed)
        return UNSAT if unrolled.refuted else solver.check(*(truth for _, _, truth in unrolled.asked))

    less = (found.asked[:at] + found.asked[at + 1 :] for at in range(len(found.asked)))
    return result(found.asked) == UNSAT and all(result(asked) == SAT for asked in less)


class Builder:
    """Makes a system; nodes are `Word`."""

    def __init__(self, name: str):
        self.system = System(name)

    def _node(self, *arguments, **named):
        self.system.nodes.append(Node(*arguments, **named))
        return Word(self, len(self.system.nodes) - 1)

    def input(self, name: str, width: int) -> "Word":
        """A word that the example states for each cycle."""
        made = self._node("input", width, name=name)
        self.system.inputs[name] = made.number
        return made

    def parameter(self, name: str, width: int) -> "Word":
        """A word of the configuration."""
        made = self._node("parameter", width, name=name)
        self.system.configuration[name] = made.number
        return made

    def const(self, value: int, width: int) -> "Word":
        """A constant."""
        return self._node("const", width, (), (value % (1 << width),))

    def state(self, name: str, width: int, init: int = 0) -> "Word":
        """A state with a first value."""
        first, made = self.const(init, width), self._node("state", width, name=name)
        self.system.states[name] = State(made.number, first.number, None)
        return made

    def array(self, name: str, index: int, width: int, init: int = 0) -> "Word":
        """A state that is an array, with one word everywhere at first. index: bits of its index."""
        word = self.const(init, width)
        first = self._node("fill", width, (word.number,), index=index)
        made = self._node("state", width, index=index, name=name)
        self.system.states[name] = State(made.number, first.number, None)
        return made

    def next(self, state: "Word", value: "Word") -> None:
        """What a state is in the next cycle."""
        name = self.system.nodes[state.number].name
        kept = self.system.states[name]
        self.system.states[name] = State(kept.node, kept.init, value.number)

    def output(self, name: str, value: "Word") -> None:
        """A word that the example tells."""
        self.system.outputs[name] = value.number

    def apply(self, op: str, *args: "Word") -> "Word":
        """An operator of `words`."""
        widths = [self.system.nodes[arg.number].width for arg in args]
        width = 1 if op in words.COMPARED or op.startswith("red") else widths[-1]
        numbers = (widths[-1],) if op in words.COMPARED or op.startswith("red") else ()
        index = self.system.nodes[args[-1].number].index
        if op == "concat":
            width, numbers = sum(widths), (widths[1],)
        elif op in words.ARRAYS:
            width, index = widths[0], self.system.nodes[args[0].number].index if op == "write" else 0
        return self._node(op, width, tuple(arg.number for arg in args), numbers, index)


@dataclass(frozen=True)
class Word:
    """A node of a builder."""

    builder: Builder
    number: int

    def _with(self, op, other):
        if isinstance(other, int):
            other = self.builder.const(other, self.builder.system.nodes[self.number].width)
        return self.builder.apply(op, self, other)

    def __add__(self, other):
        return self._with("add", other)

    def __sub__(self, other):
        return self._with("sub", other)

    def __and__(self, other):
        return self._with("and", other)

    def __or__(self, other):
        return self._with("or", other)

    def __invert__(self):
        return self.builder.apply("not", self)

    def extended(self, width: int) -> "Word":
        """The same number in `width` bits."""
        own = self.builder.system.nodes[self.number].width
        return self.builder._node("uext", width, (self.number,), (own,))

    def read(self, index: "Word") -> "Word":
        """The word of this array at an index."""
        return self.builder.apply("read", self, index)

    def write(self, index: "Word", value: "Word") -> "Word":
        """This array with another word at an index."""
        return self.builder.apply("write", self, index, value)

    def equals(self, other) -> "Word":
        """One bit: whether both are the same."""
        return self._with("eq", other)

    def below(self, other) -> "Word":
        """One bit: whether this is less, unsigned."""
        return self._with("ult", other)

    def choose(self, one: "Word", other: "Word") -> "Word":
        """`one` where this bit is set, else `other`."""
        return self.builder.apply("ite", self, one, other)


@dataclass(frozen=True)
class Mini:
    """system. layers: what is made least. signals: names and bits of what an example may tell. pins: those of them that
    are no outputs. given: bits of the inputs. run: ``(words, inputs) -> {signal: [cycles, configurations]}``, words
    ``{name: [configurations]}``."""

    system: System
    layers: tuple
    signals: dict[str, int]
    pins: tuple[str, ...]
    given: dict[str, int]
    run: Callable

    def configurations(self) -> dict[str, np.ndarray]:
        """Every configuration, a column for each."""
        widths = [self.system.width(name) for name in self.system.configuration]
        assert sum(widths) <= 12
        every = np.array(list(itertools.product(*(range(1 << width) for width in widths))))
        return dict(zip(self.system.configuration, every.T, strict=True))

    def values(self, words) -> list[np.ndarray]:
        """Of each layer its value under each configuration; of layers of choices, -1 where none allows it."""
        return [_value(layer, words) for layer in self.layers]


def _value(layer, words):
    if isinstance(layer, Least):
        return sum(np.prod([words[word] + more for word, more in factors], axis=0) for factors in layer.products)
    total = 0
    for group in layer.groups:
        least = np.full(len(next(iter(words.values()))), -1)
        for choice in sorted(group, key=lambda choice: -choice.cost):
            fits = np.ones(len(least), bool)
            for name, word in choice.fixed.items():
                fits &= words[name] == word
            for name, word in choice.least.items():
                fits &= words[name] >= word
            least[fits] = choice.cost
        total = np.where((total < 0) | (least < 0), -1, total + least) if len(group) else total
    return total


def pwm() -> Mini:
    """A pulse: high while a counter up to `period`, moved by `phase`, is below `duty`."""
    b = Builder("pwm")
    period, duty, phase = (b.parameter(name, 4) for name in ("period", "duty", "phase"))
    count = b.state("count", 4)
    b.next(count, count.equals(period).choose(b.const(0, 4), count + 1))
    b.output("out", (count + phase).below(duty))

    def run(words, _inputs):
        count, out = np.zeros_like(words["period"]), []
        for _ in range(CYCLES):
            out.append((count, ((count + words["phase"]) % 16 < words["duty"]).astype(int)))
            count = np.where(count == words["period"], 0, (count + 1) % 16)
        return {"count": np.array([each[0] for each in out]), "out": np.array([each[1] for each in out])}

    layers = (Least("area", [[("period", 1), ("duty", 0)]]), Least("phase", [[("phase", 0)]]))
    return Mini(b.system, layers, {"out": 1, "count": 4}, ("count",), {}, run)


def generator() -> Mini:
    """Two loops around a schedule of four bits: fires when the cycle is the running sum."""
    b = Builder("generator")
    start, last = b.parameter("start", 2), [b.parameter(f"last{level}", 2) for level in range(2)]
    step = [b.parameter(f"step{level}", 3) for level in range(2)]
    cycle, moved, done = b.state("cycle", 4), b.state("moved", 4), b.state("done", 1)
    at = [b.state(f"at{level}", 2) for level in range(2)]
    fire = cycle.equals(moved + start.extended(4)) & ~done
    ends = [at[level].equals(last[level]) for level in range(2)]
    one, zero = b.const(1, 1), b.const(0, 2)
    b.next(cycle, cycle + 1)
    b.next(at[0], fire.choose(ends[0].choose(zero, at[0] + 1), at[0]))
    b.next(at[1], (fire & ends[0]).choose(ends[1].choose(zero, at[1] + 1), at[1]))
    b.next(done, (fire & ends[0] & ends[1]).choose(one, done))
    b.next(moved, fire.choose(moved + ends[0].choose(step[1], step[0]).extended(4), moved))
    b.output("fire", fire)

    def run(words, _inputs):
        zero = np.zeros_like(words["start"])
        moved, done, at0, at1, seen = zero, zero.astype(bool), zero, zero, []
        for cycle in range(CYCLES):
            fire = (cycle % 16 == (moved + words["start"]) % 16) & ~done
            inner, outer = at0 == words["last0"], at1 == words["last1"]
            seen.append((moved, fire.astype(int)))
            moved = np.where(fire, (moved + np.where(inner, words["step1"], words["step0"])) % 16, moved)
            done = done | (fire & inner & outer)
            at1 = np.where(fire & inner, np.where(outer, 0, (at1 + 1) % 4), at1)
            at0 = np.where(fire, np.where(inner, 0, (at0 + 1) % 4), at0)
        return {"moved": np.array([each[0] for each in seen]), "fire": np.array([each[1] for each in seen])}

    one_level = {"last1": 0, "step1": 0}
    levels = Choices(
        "levels",
        [
            [
                Choice(0, {"last0": 0, "step0": 0, **one_level}, {}),
                Choice(1, one_level, {"last0": 1}),
                Choice(2, {}, {"last0": 1, "last1": 1}),
            ]
        ],
    )
    extents = Least("extents", [[("last0", 1), ("last1", 1)]])
    steps, starts = Least("steps", [[("step0", 0)], [("step1", 0)]]), Least("starts", [[("start", 0)]])
    return Mini(b.system, (levels, extents, steps, starts), {"fire": 1, "moved": 4}, ("moved",), {}, run)


def fifo() -> Mini:
    """Two words in an array, with an offset on what leaves it; says when it is at least `high`, at most `low` full."""
    b = Builder("fifo")
    push, pop, data = b.input("push", 1), b.input("pop", 1), b.input("data", 4)
    high, low, offset = b.parameter("high", 2), b.parameter("low", 2), b.parameter("offset", 4)
    words, count = b.array("words", 1, 4), b.state("count", 2)
    head, tail = b.state("head", 1), b.state("tail", 1)
    puts, takes = push & count.below(2), pop & ~count.equals(0)
    b.next(words, puts.choose(words.write(tail, data), words))
    b.next(tail, tail + puts)
    b.next(head, head + takes)
    b.next(count, count + puts.extended(2) - takes.extended(2))
    b.output("out", words.read(head) + offset)
    b.output("full", ~count.below(high))
    b.output("empty", ~low.below(count))

    def run(words, inputs):
        kept, count, head, tail, seen = [0, 0], 0, 0, 0, {"out": [], "full": [], "empty": []}
        for push, pop, data in zip(inputs["push"], inputs["pop"], inputs["data"], strict=True):
            seen["out"].append((kept[head] + words["offset"]) % 16)
            seen["full"].append((count >= words["high"]).astype(int))
            seen["empty"].append((count <= words["low"]).astype(int))
            puts, takes = push and count < 2, pop and count > 0
            if puts:
                kept[tail] = data
            tail, head, count = (tail + puts) % 2, (head + takes) % 2, count + puts - takes
        return {name: np.array(rows) for name, rows in seen.items()}

    layers = (Least("high", [[("high", 0)]]), Least("rest", [[("low", 0)], [("offset", 1)]]))
    given = {"push": 1, "pop": 1, "data": 4}
    return Mini(b.system, layers, {"out": 4, "full": 1, "empty": 1}, (), given, run)


MINIS = {"pwm": pwm(), "generator": generator(), "fifo": fifo()}
