"""State machines over words: inputs, states, outputs, and a configuration that stays as it is.

Nodes are numbered; a node's arguments have lower numbers. Words are unsigned numbers below ``2**width``; arrays map
words to words. In a cycle all nodes have values; then every state takes the value of its ``next`` node.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilewright.core.errors import ConfigError
from tilewright.pushmem.configure import words

LEAVES = ("input", "parameter", "state", "const")


@dataclass(frozen=True)
class Node:
    """An operator of `words.OPERATORS` or ``words.ARRAYS``, or a leaf. width: bits; of an array those of its elements.
    args: numbers of nodes. numbers: what the operator needs besides; of a constant its value. index: bits of an array's
    index, 0 for words. name: of a leaf."""

    op: str
    width: int
    args: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    index: int = 0
    name: str = ""


@dataclass(frozen=True)
class State:
    """A state's nodes: its own, that of its first value (None: 0) and that of its next one (None: it stays)."""

    node: int
    init: int | None
    next: int | None


@dataclass
class System:
    """See the module. inputs, configuration, outputs, inner: nodes by name; states by name. constraints: names of
    outputs that are 1 in every cycle."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    configuration: dict[str, int] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    inner: dict[str, int] = field(default_factory=dict)
    constraints: list[str] = field(default_factory=list)

    def told(self) -> list[str]:
        """Names of what an example may tell: all but the configuration."""
        words = [name for name, state in self.states.items() if not self.nodes[state.node].index]
        inner = [name for name, number in self.inner.items() if not self.nodes[number].index]
        hidden = self.configuration
        return [name for name in dict.fromkeys([*self.inputs, *self.outputs, *words, *inner]) if name not in hidden]

    def width(self, name: str) -> int:
        """Bits of an input, a configuration word, a state or an output. Raises `ConfigError`."""
        return self.nodes[self.node(name)].width

    def node(self, name: str) -> int:
        """The node of a name. Raises `ConfigError`."""
        for names in (self.outputs, self.inputs, self.configuration):
            if name in names:
                return names[name]
        if name in self.states:
            return self.states[name].node
        if name in self.inner:
            return self.inner[name]
        known = [*self.outputs, *self.inputs, *self.configuration, *self.states]
        raise ConfigError(f"{self.name}: unknown signal {name!r}; known: {some(known)}")

    def needed(self, names: Iterable[str]) -> list[int]:
        """Numbers, increasing, of the nodes that decide the signals `names` in any cycle."""
        following = {state.node: state for state in self.states.values()}
        found, waiting = set(), [self.node(name) for name in names]
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            waiting += self.nodes[number].args
            if number in following:
                state = following[number]
                waiting += [each for each in (state.init, state.next) if each is not None]
        return sorted(found)

    def starting(self, needed: Iterable[int]) -> list[int]:
        """The states among `needed` and the nodes that their first values follow from, each behind what it needs.

        Raises `ConfigError` for a first value that follows from an input or from itself.
        """
        inits = {state.node: state.init for state in self.states.values()}
        order, begun, done = [], set(), set()
        waiting = [number for number in needed if number in inits][::-1]
        while waiting:
            number = waiting[-1]
            node = self.nodes[number]
            if number in done or number in begun:
                waiting.pop()
                if number not in done:
                    done.add(number)
                    order.append(number)
                continue
            if node.op == "input":
                raise ConfigError(
                    f"{self.name}: expected first values of constants, found one of the input {node.name}"
                )
            begun.add(number)
            before = [each for each in (inits.get(number), *node.args) if each is not None and each not in done]
            if not begun.isdisjoint(before):
                raise ConfigError(f"{self.name}: expected first values of constants, found one that needs itself")
            waiting += before
        return order


def some(names: Iterable[str]) -> str:
    """The first of many names, in words."""
    names = list(names)
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


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
