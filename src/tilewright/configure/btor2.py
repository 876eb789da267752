"""Reader of BTOR2 (Niemetz et al., 2018): bit vectors and arrays, states with first values, symbols as names.

What the format has for properties without end (justice, fair) is refused. Constraints and bad states are no part of an
example's question; they are refused as well, for no answer would keep them.
"""

import re

from tilewright.configure import words
from tilewright.configure.system import Node, State, System
from tilewright.core.errors import ArtifactError, ConfigError

_CONSTANTS = {"const": 2, "constd": 10, "consth": 16}
_FIXED = {"zero": 0, "one": 1, "ones": -1}
_REFUSED = ("justice", "fair", "constraint", "bad")


def read(text: str, configuration: str, name: str = "design") -> System:
    """The `System` of a design. Its configuration: the inputs whose whole names match the expression `configuration`.

    Raises `ArtifactError` that names the line, and `ConfigError` where nothing matches.
    """
    try:
        chosen = re.compile(configuration)
    except re.error as error:
        raise ConfigError(f"expected a regular expression, found {configuration!r}: {error}") from error
    reader = _Reader(name, chosen)
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition(";")[0].split()
        if parts:
            reader.line(f"{name}: line {number}", parts)
    system = reader.system
    if not system.configuration:
        shown = ", ".join(list(system.inputs)[:12])
        raise ConfigError(f"{name}: expected inputs that match {configuration!r}, found none; inputs: {shown}")
    for state, (init, following) in reader.follows.items():
        label = system.nodes[state].name
        if label in system.states:
            raise ArtifactError(f"{name}: two states have the name {label}")
        system.states[label] = State(state, init, following)
    return system


class _Reader:
    def __init__(self, name, chosen):
        self.system, self.chosen = System(name), chosen
        # Sorts and nodes by the numbers of the file.
        self.sorts, self.known, self.follows = {}, {}, {}

    def line(self, where, parts):
        try:
            number, op = int(parts[0]), parts[1]
            self._line(where, number, op, parts[2:])
        except (IndexError, ValueError) as error:
            raise ArtifactError(f"{where}: expected a node of BTOR2, found {' '.join(parts)!r}") from error

    def _line(self, where, number, op, rest):
        if op in _REFUSED:
            raise ArtifactError(f"{where}: {op} is no part of an example's question; expected a design without it")
        if op == "sort":
            self.sorts[number] = (int(rest[1]), 0) if rest[0] == "bitvec" else self._array(where, rest)
        elif op == "output":
            label = rest[1] if len(rest) > 1 else f"output{number}"
            self._unused(where, label, self.system.outputs)
            self.system.outputs[label] = self._argument(where, rest[0])
        elif op in ("init", "next"):
            state, value = (self._argument(where, each) for each in rest[1:3])
            if self.system.nodes[state].op != "state":
                raise ArtifactError(f"{where}: {op} expects a state, found node {rest[1]}")
            if op == "init" and self.system.nodes[state].index and not self.system.nodes[value].index:
                value = self._made(
                    Node("fill", self.system.nodes[state].width, (value,), index=self.system.nodes[state].index)
                )
            of, to = self.system.nodes[value], self.system.nodes[state]
            if (of.width, of.index) != (to.width, to.index):
                raise ArtifactError(f"{where}: {op} of {_shown(to)} with {_shown(of)}; expected the same")
            init, following = self.follows[state]
            self.follows[state] = (value, following) if op == "init" else (init, value)
        else:
            self.known[number] = self._made(self._node(where, number, op, self._sort(where, rest[0]), rest[1:]))
            made = self.system.nodes[self.known[number]]
            if made.op == "state":
                self.follows[self.known[number]] = None, None
            elif made.op in ("input", "parameter"):
                names = self.system.inputs if made.op == "input" else self.system.configuration
                self._unused(where, made.name, {**self.system.inputs, **self.system.configuration})
                names[made.name] = self.known[number]

    def _unused(self, where, label, names):
        if label in names:
            raise ArtifactError(f"{where}: the name {label} is used twice")

    def _array(self, where, rest):
        if rest[0] != "array":
            raise ArtifactError(f"{where}: expected a sort bitvec or array, found {rest[0]}")
        return self._sort(where, rest[2])[0], self._sort(where, rest[1])[0]

    def _node(self, where, number, op, sort, rest):
        """A `Node` of a line, whose `sort` is ``(width, bits of the index)``."""
        width, index = sort
        if op in ("input", "state"):
            label = rest[0] if rest else f"{op}{number}"
            chosen = op == "input" and self.chosen.fullmatch(label)
            return Node("parameter" if chosen else op, width, index=index, name=label)
        if op in _CONSTANTS or op in _FIXED:
            value = int(rest[0], _CONSTANTS[op]) if op in _CONSTANTS else _FIXED[op]
            return Node("const", width, (), (value % (1 << width),))
        count = 1 if op in (*words.UNARY, "uext", "sext", "slice") else 3 if op in ("ite", "write") else 2
        if op not in words.OPERATORS and op not in ("read", "write"):
            raise ArtifactError(f"{where}: unknown operator {op}")
        args = tuple(self._argument(where, each) for each in rest[:count])
        if len(args) < count:
            raise ArtifactError(f"{where}: {op} expects {count} nodes, found {len(args)}")
        of = [self.system.nodes[arg] for arg in args]
        _check(where, op, of)
        if op == "slice":
            numbers = int(rest[1]), int(rest[2])
            if not 0 <= numbers[1] <= numbers[0] < of[0].width:
                raise ArtifactError(f"{where}: slice of bits {numbers[0]} to {numbers[1]} of {of[0].width}")
            wanted = numbers[0] - numbers[1] + 1
        elif op in ("uext", "sext"):
            numbers, wanted = (of[0].width,), of[0].width + int(rest[1])
            if int(rest[1]) < 0:
                raise ArtifactError(f"{where}: {op} by {rest[1]} bits; expected at least 0")
        elif op == "concat":
            numbers, wanted = (of[1].width,), of[0].width + of[1].width
        elif op in words.COMPARED or op.startswith("red"):
            numbers, wanted = (of[0].width,), 1
        else:
            numbers, wanted = (), of[-1].width if op != "read" else of[0].width
        if wanted != width:
            raise ArtifactError(f"{where}: {op} gives {wanted} bits, its sort has {width}")
        return Node(op, width, args, numbers, index)

    def _made(self, node):
        self.system.nodes.append(node)
        return len(self.system.nodes) - 1

    def _sort(self, where, text):
        if int(text) not in self.sorts:
            raise ArtifactError(f"{where}: unknown sort {text}")
        return self.sorts[int(text)]

    def _argument(self, where, text):
        number = int(text)
        if abs(number) not in self.known:
            raise ArtifactError(f"{where}: unknown node {text}; a node stands before those that use it")
        made = self.known[abs(number)]
        return made if number > 0 else self._made(Node("not", self.system.nodes[made].width, (made,)))


def _check(where, op, of):
    """Arguments of an operator have the widths that it takes."""
    sizes = [(node.width, node.index) for node in of]
    if op in ("read", "write"):
        right = of[0].index and sizes[1] == (of[0].index, 0) and (op == "read" or sizes[2] == (of[0].width, 0))
    elif op == "ite":
        right = sizes[0] == (1, 0) and sizes[1] == sizes[2]
    elif op in ("implies", "iff"):
        right = sizes == [(1, 0), (1, 0)]
    elif op in words.SAME or op in words.COMPARED:
        # ASSUME: arrays are never compared, as in what Yosys writes.
        right = sizes[0] == sizes[1] and not of[0].index
    else:
        right = not any(node.index for node in of)
    if not right:
        raise ArtifactError(f"{where}: {op} does not take {', '.join(map(_shown, of))}")


def _shown(node):
    return f"{node.width} bits" if not node.index else f"an array of {node.width} bits"
