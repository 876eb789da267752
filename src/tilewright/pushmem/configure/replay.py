"""The interpreter: a system with its configuration, on integers, cycle by cycle.

A cycle is a Python function that is written for the system, one line a node: 4,100 cycles of a memory tile take about a
second. Operators that have no line of their own are called from `words`, which defines them all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.core.errors import ConfigError
from tilewright.pushmem.configure.system import Node, System, some
from tilewright.pushmem.configure.words import OPERATORS

# Lines in place of calls. {m}: the largest word; {0}, {1}, {2}: arguments; {n0}, {n1}: numbers of the node.
_LINES = {
    "not": "{0} ^ {m}",
    "redor": "1 if {0} else 0",
    "uext": "{0}",
    "slice": "{0} >> {n1} & {m}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "eq": "1 if {0} == {1} else 0",
    "neq": "1 if {0} != {1} else 0",
    "ult": "1 if {0} < {1} else 0",
    "ulte": "1 if {0} <= {1} else 0",
    "ugt": "1 if {0} > {1} else 0",
    "ugte": "1 if {0} >= {1} else 0",
    "add": "{0} + {1} & {m}",
    "sub": "{0} - {1} & {m}",
    "mul": "{0} * {1} & {m}",
    "concat": "{0} << {n0} | {1}",
    "ite": "{1} if {0} else {2}",
    "read": "{0}.get({1}, {0}[None])",
}


def run(
    system: System,
    configuration: Mapping[str, int],
    inputs: Mapping[str, Sequence[int]],
    cycles: int,
    names: Sequence[str],
    begin: Mapping[str, int] | None = None,
) -> dict[str, list[int]]:
    """Values of the signals `names` in each of `cycles` cycles. inputs: a value for each cycle; those that are not
    named are 0. configuration: every word that decides them. begin: first words of states that have none of their own.

    Raises `ConfigError` for unknown names, and for a configuration that leaves a word out or has one that is too wide.
    """
    for name, value in configuration.items():
        if name not in system.configuration:
            raise ConfigError(
                f"{system.name}: unknown configuration word {name!r}; known: {some(system.configuration)}"
            )
        width = system.width(name)
        if not 0 <= value < 1 << width:
            raise ConfigError(f"{system.name}: {name}: expected a word of {width} bits, found {value}")
    needed = system.needed(names)
    values = _begin(system, configuration, needed)
    values |= {system.states[name].node: word for name, word in (begin or {}).items()}
    states = [state for state in system.states.values() if state.node in values and state.next is not None]
    given = [node.name for number in needed if (node := system.nodes[number]).op == "input"]
    columns = {name: inputs.get(name) or [0] * cycles for name in given}
    cycle = _written(system, needed, values, states, given, names)
    seen = cycle(zip(*columns.values(), strict=True) if columns else [()] * cycles, values)
    return {name: [row[place] for row in seen] for place, name in enumerate(names)}


def _begin(system, configuration, needed):
    """Values of what does not change, and of the states, before the first cycle."""
    values = {}
    for number in needed:
        node = system.nodes[number]
        if node.op == "const":
            values[number] = node.numbers[0]
        elif node.op == "parameter":
            if node.name not in configuration:
                raise ConfigError(f"{system.name}: expected a value of {node.name}, found none")
            values[number] = configuration[node.name]
    states = {state.node: state for state in system.states.values()}
    for number in system.starting(needed):
        node = system.nodes[number]
        if number in states:
            init = states[number].init
            values[number] = values[init] if init is not None else _fill(node, 0) if node.index else 0
        elif number not in values:
            values[number] = function(node)(node, *(values[arg] for arg in node.args))
    return values


def _written(system, needed, values, states, given, names):
    """A function of an iterator over the inputs' words of each cycle; it gives the words of `names` of each."""
    scope: dict = {}
    nodes = system.nodes
    moving = {number for number in needed if nodes[number].op in ("input", "state")}
    kept = [number for number in needed if nodes[number].op in ("const", "parameter", "state")]
    still, lines = [], []
    for number in needed:
        node = nodes[number]
        if node.op in ("const", "parameter", "input", "state"):
            continue
        line = f"v{number} = {_line(node, number, scope)}"
        if moving.isdisjoint(node.args):
            still.append(line)
        else:
            moving.add(number)
            lines.append(line)
    inputs = [f"v{system.inputs[name]}" for name in given]
    told = ", ".join(f"v{system.node(name)}" for name in names)
    body = [
        "def run(rows, values):",
        *(f"    v{number} = values[{number}]" for number in kept),
        *(f"    {line}" for line in still),
        "    seen = []",
        f"    for {', '.join(inputs) + ',' if inputs else '_'} in rows:",
        *(f"        {line}" for line in lines),
        f"        seen.append(({told},))" if names else "        seen.append(())",
    ]
    if states:
        ends = ", ".join(f"v{state.node}" for state in states), ", ".join(f"v{state.next}" for state in states)
        body.append(f"        {ends[0]} = {ends[1]}")
    # What is written holds numbers of nodes alone, never a name of the design.
    exec("\n".join([*body, "    return seen"]), scope)
    return scope["run"]


def _line(node, number, scope):
    args = [f"v{arg}" for arg in node.args]
    if node.op in _LINES:
        numbers = {f"n{place}": each for place, each in enumerate(node.numbers)}
        return _LINES[node.op].format(*args, m=(1 << node.width) - 1, **numbers)
    scope[f"f{number}"], scope[f"n{number}"] = function(node), node
    return f"f{number}(n{number}, {', '.join(args)})"


def function(node: Node) -> Callable[..., Any]:
    """What computes a node, as ``(node, *values)``; also of arrays: dicts of what differs from the word under None."""
    arrays: dict[str, Callable[..., Any]] = {"fill": _fill, "read": _read, "write": _write, "same": _same}
    return arrays.get(node.op) or OPERATORS[node.op]


def _fill(_node, value):
    return {None: value}


def _read(_node, array, index):
    return array.get(index, array[None])


def _write(_node, array, index, value):
    return array if array.get(index, array[None]) == value else {**array, index: value}


def _same(node, one, other):
    # numbers: bits of the index. The words under None are of no account where all others are told.
    told = (one.keys() | other.keys()) - {None}
    rest = [None] if len(told) < 1 << node.numbers[0] else []
    return int(all(one.get(index, one[None]) == other.get(index, other[None]) for index in [*told, *rest]))
