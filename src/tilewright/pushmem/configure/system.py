"""State machines over words: inputs, states, outputs, and a configuration that stays as it is.

Nodes are numbered; a node's arguments have lower numbers. Words are unsigned numbers below ``2**width``; arrays map
words to words. In a cycle all nodes have values; then every state takes the value of its ``next`` node.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilewright.core.errors import ConfigError


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
    outputs that are 1 in every cycle; bad: of those that must not be 1."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    configuration: dict[str, int] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    inner: dict[str, int] = field(default_factory=dict)
    constraints: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

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
