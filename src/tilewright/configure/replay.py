"""The interpreter: a system with its configuration, on integers, cycle by cycle."""

from collections.abc import Iterator, Mapping, Sequence

from tilewright.configure.system import System
from tilewright.configure.words import OPERATORS
from tilewright.core.errors import ConfigError


def run(
    system: System,
    configuration: Mapping[str, int],
    inputs: Mapping[str, Sequence[int]],
    cycles: int,
    names: Sequence[str],
) -> dict[str, list[int]]:
    """Values of the signals `names` in each of `cycles` cycles. inputs: a value for each cycle; those that are not
    named are 0.

    Raises `ConfigError` for unknown names and for a configuration that leaves a word out.
    """
    columns = {name: [] for name in names}
    wanted = {name: system.node(name) for name in names}
    for values in _cycles(system, configuration, inputs, cycles, names):
        for name, number in wanted.items():
            columns[name].append(values[number])
    return columns


def _cycles(system, configuration, inputs, cycles, names) -> Iterator[list]:
    """Values of all nodes that are needed, for each cycle."""
    nodes, needed = system.nodes, system.needed(names)
    values = [0] * len(nodes)
    following, read, steps = [], [], []
    states = {state.node: state for state in system.states.values()}
    for number in needed:
        node = nodes[number]
        if node.op == "const":
            values[number] = node.numbers[0]
        elif node.op == "parameter":
            if node.name not in configuration:
                raise ConfigError(f"{system.name}: expected a value of {node.name}, found none")
            values[number] = configuration[node.name]
        elif node.op == "input":
            read.append((number, inputs.get(node.name)))
        elif node.op == "state":
            values[number] = {} if node.index else 0
            if states[number].next is not None:
                following.append((number, states[number].next))
        else:
            steps.append((number, _function(node), node, *node.args))
    for number, function, node, *args in steps:
        values[number] = function(node, *(values[arg] for arg in args))
    for number in needed:
        if number in states and states[number].init is not None:
            values[number] = values[states[number].init]
    for cycle in range(cycles):
        for number, column in read:
            values[number] = 0 if column is None else column[cycle]
        for number, function, node, *args in steps:
            values[number] = function(node, *[values[arg] for arg in args])
        yield values
        for number, value in [(number, values[at]) for number, at in following]:
            values[number] = value


def _function(node):
    return {"fill": _fill, "read": _read, "write": _write}.get(node.op) or OPERATORS[node.op]


# An array is a dict of what differs from what stands under None everywhere else.
def _fill(_node, value):
    return {None: value}


def _read(_node, array, index):
    return array.get(index, array.get(None, 0))


def _write(_node, array, index, value):
    return array if array.get(index, array.get(None, 0)) == value else {**array, index: value}
