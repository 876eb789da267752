"""Reader of BTOR2 (Niemetz et al., 2018): bit vectors and arrays, states with first values, symbols as names.

A constraint has to hold in every cycle of an example. A bad state is a signal that an example may tell; only a
statement for all inputs asks for it. A state that has neither a first value nor a next one is an input. Properties
without end (justice, fair), arrays of arrays, and arrays that go in or out are refused.
"""

import re
from dataclasses import replace

from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure import words
from tilewright.pushmem.configure.system import Node, State, System, some

_CONSTANTS = {"const": 2, "constd": 10, "consth": 16}
_FIXED = {"zero": 0, "one": 1, "ones": -1}
_REFUSED = ("justice", "fair")
_TOLD = ("output", "bad", "constraint")
# Digits of a constant.
_DIGITS = {"const": "[01]+", "constd": "-?[0-9]+", "consth": "[0-9a-fA-F]+"}
# Bits of a word, and of an array's index, at most.
_WIDEST = 1 << 16
# Bits of the index of arrays that are compared, at most.
_COMPARED = 10


def read(text: str, configuration: str, name: str = "design") -> System:
    """Read a design in BTOR2.

    Parameters
    ----------
    text : str
        The design.
    configuration : str
        Regular expression. Inputs whose whole names match it are the configuration.
    name : str
        Name of the design in messages.

    Returns
    -------
    System

    Raises
    ------
    ArtifactError
        For a line that cannot be read; the message names it.
    ConfigError
        For an expression that no input matches.

    Examples
    --------
    >>> from tilewright.pushmem.configure import btor2, query
    >>> from tilewright.pushmem.configure.example import Example
    >>> text = "1 sort bitvec 4\\n2 input 1 config_step\\n3 input 1 word\\n4 add 1 2 3\\n5 output 4 sum\\n"
    >>> system = btor2.read(text, "config_.*")
    >>> query.solve(system, Example(2, inputs={"word": [1, 5]}, outputs={"sum": [4, 8]})).registers
    {'config_step': 3}
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
        shown = some(system.inputs)
        raise ConfigError(f"{name}: expected inputs that match {configuration!r}, found none; inputs: {shown}")
    for state, (init, following) in reader.follows.items():
        node = system.nodes[state]
        if node.name in system.states:
            raise ArtifactError(f"{reader.places[state]}: two states have the name {node.name}")
        if following is None and init is not None:
            raise ArtifactError(
                f"{reader.places[state]}: state {node.name} has an initial value and no next; expected a next, without "
                "which it is free after the first cycle"
            )
        if following is None and not node.index:
            reader.unused(reader.places[state], node.name, {**system.inputs, **system.configuration})
            system.nodes[state], system.inputs[node.name] = replace(node, op="input"), state
        else:
            # An array without both is 0 everywhere, as an input is that the example does not state.
            system.states[node.name] = State(state, init, following)
    return system


class _Reader:
    def __init__(self, name, chosen):
        self.system, self.chosen = System(name), chosen
        # Sorts and nodes by the numbers of the file, and all of its numbers.
        self.sorts, self.known, self.follows, self.numbers = {}, {}, {}, set()
        # Where each state stands.
        self.places: dict[int, str] = {}

    def line(self, where, parts):
        try:
            number, op = int(parts[0]), parts[1]
            if number < 1:
                raise ArtifactError(f"{where}: expected a number of at least 1, found {number}")
            if number in self.numbers:
                raise ArtifactError(f"{where}: the number {number} is used twice")
            self.numbers.add(number)
            self._line(where, number, op, parts[2:])
        except (IndexError, ValueError) as error:
            raise ArtifactError(f"{where}: expected a node of BTOR2, found {' '.join(parts)!r}") from error

    def _line(self, where, number, op, rest):
        if op in _REFUSED:
            raise ArtifactError(f"{where}: expected a design without {op}, which examples do not constrain")
        if op == "sort":
            self.sorts[number] = self._new_sort(where, rest)
        elif op in _TOLD:
            label = rest[1] if len(rest) > 1 else f"{op}{number}"
            self.unused(where, label, self.system.outputs)
            self._tell(where, op, label, self._argument(where, rest[0]))
        elif op in ("init", "next"):
            self._follow(where, op, rest)
        else:
            node, used = self._node(where, number, op, self._sort(where, rest[0]), rest[1:])
            self.known[number] = self._made(node)
            if node.op == "state":
                self.follows[self.known[number]], self.places[self.known[number]] = (None, None), where
            elif node.op in ("input", "parameter"):
                names = self.system.inputs if node.op == "input" else self.system.configuration
                self.unused(where, node.name, {**self.system.inputs, **self.system.configuration})
                names[node.name] = self.known[number]
            elif len(rest) > used + 1:
                # Yosys names a wire by an extension of no bits: the name is that of what is extended.
                same = node.op in ("uext", "sext") and node.numbers[0] == node.width
                self.system.inner.setdefault(rest[used + 1], node.args[0] if same else self.known[number])

    def _tell(self, where, op, label, made):
        node = self.system.nodes[made]
        if node.index:
            raise ArtifactError(f"{where}: {op} of {_shown(node)}; expected a word")
        if op != "output" and node.width != 1:
            raise ArtifactError(f"{where}: {op} of {_shown(node)}; expected 1 bit")
        self.system.outputs[label] = made
        if op != "output":
            (self.system.constraints if op == "constraint" else self.system.bad).append(label)

    def _follow(self, where, op, rest):
        sort, (state, value) = self._sort(where, rest[0]), (self._argument(where, each) for each in rest[1:3])
        to, of = self.system.nodes[state], self.system.nodes[value]
        if to.op != "state":
            raise ArtifactError(f"{where}: {op} expects a state, found node {rest[1]}")
        if self.follows[state][op == "next"] is not None:
            raise ArtifactError(f"{where}: a second {op} of state {to.name}")
        if op == "init" and to.index and not of.index:
            value = self._made(Node("fill", to.width, (value,), index=to.index))
            of = replace(self.system.nodes[value], width=of.width)
        if (of.width, of.index) != (to.width, to.index) or sort != (to.width, to.index):
            raise ArtifactError(f"{where}: {op} of {_shown(to)} with {_shown(of)}; expected the same")
        init, following = self.follows[state]
        self.follows[state] = (value, following) if op == "init" else (init, value)

    def unused(self, where, label, names):
        """Raise where a name is one of `names`."""
        if label in names:
            raise ArtifactError(f"{where}: the name {label} is used twice")

    def _new_sort(self, where, rest):
        """``(bits, bits of the index)``; the latter are 0 of a word."""
        if rest[0] == "bitvec":
            if not 1 <= int(rest[1]) <= _WIDEST:
                raise ArtifactError(f"{where}: expected a sort of at least 1 bit, at most {_WIDEST}, found {rest[1]}")
            return int(rest[1]), 0
        if rest[0] != "array":
            raise ArtifactError(f"{where}: expected a sort bitvec or array, found {rest[0]}")
        index, element = self._sort(where, rest[1]), self._sort(where, rest[2])
        if index[1] or element[1]:
            raise ArtifactError(f"{where}: expected an array of words by words, found one of arrays")
        return element[0], index[0]

    def _node(self, where, number, op, sort, rest):
        """``(node, how many of `rest` it takes)`` of a line, whose `sort` is ``(width, bits of the index)``."""
        width, index = sort
        if op in ("input", "state"):
            label = rest[0] if rest else f"{op}{number}"
            chosen = op == "input" and self.chosen.fullmatch(label)
            if index and op == "input":
                raise ArtifactError(f"{where}: the input {label} is an array; expected a word")
            return Node("parameter" if chosen else op, width, index=index, name=label), 1
        if op in _CONSTANTS or op in _FIXED:
            return Node("const", width, (), (_constant(where, op, sort, rest),)), int(op in _CONSTANTS)
        count = 1 if op in (*words.UNARY, "uext", "sext", "slice") else 3 if op in ("ite", "write") else 2
        if op not in words.OPERATORS and op not in ("read", "write"):
            raise ArtifactError(f"{where}: unknown operator {op}")
        args = tuple(self._argument(where, each) for each in rest[:count])
        if len(args) < count:
            raise ArtifactError(f"{where}: {op} expects {count} nodes, found {len(args)}")
        of = [self.system.nodes[arg] for arg in args]
        _check(where, op, of)
        numbers: tuple[int, ...] = ()
        wanted, more = (of[-1].width, of[-1].index), 0
        if op == "slice":
            numbers, more = (int(rest[1]), int(rest[2])), 2
            if not 0 <= numbers[1] <= numbers[0] < of[0].width:
                raise ArtifactError(f"{where}: slice of bits {numbers[0]} to {numbers[1]} of {of[0].width}")
            wanted = numbers[0] - numbers[1] + 1, 0
        elif op in ("uext", "sext"):
            numbers, wanted, more = (of[0].width,), (of[0].width + int(rest[1]), 0), 1
            if int(rest[1]) < 0:
                raise ArtifactError(f"{where}: {op} by {rest[1]} bits; expected at least 0")
        elif op == "concat":
            numbers, wanted = (of[1].width,), (of[0].width + of[1].width, 0)
        elif op in words.COMPARED or op.startswith("red"):
            numbers, wanted = (of[0].width,), (1, 0)
        elif op in ("read", "write"):
            wanted = of[0].width, of[0].index if op == "write" else 0
        if wanted != sort:
            given, found = (_shown(Node("", each[0], index=each[1])) for each in (wanted, sort))
            raise ArtifactError(f"{where}: {op} gives {given}, its sort has {found}")
        if op in ("eq", "neq") and of[0].index:
            if of[0].index > _COMPARED:
                raise ArtifactError(f"{where}: {op} of {_shown(of[0])}; expected an index of at most {_COMPARED} bits")
            same = Node("same", 1, args, (of[0].index,))
            return same if op == "eq" else Node("not", 1, (self._made(same),)), count
        return Node(op, width, args, numbers, index), count + more

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
            raise ArtifactError(f"{where}: unknown node {text}; define a node in an earlier line")
        made = self.known[abs(number)]
        if number < 0:
            _check(where, "not", [self.system.nodes[made]])
        return made if number > 0 else self._made(Node("not", self.system.nodes[made].width, (made,)))


def _constant(where, op, sort, rest):
    """The number of a constant, which its sort holds."""
    width, index = sort
    if index:
        raise ArtifactError(f"{where}: {op} of an array; expected a word")
    if op in _CONSTANTS and not re.fullmatch(_DIGITS[op], rest[0]):
        raise ArtifactError(f"{where}: expected digits of {op}, found {rest[0]}")
    value = int(rest[0], _CONSTANTS[op]) if op in _CONSTANTS else _FIXED[op]
    if not -(1 << width - 1) <= value < 1 << width or (op == "const" and len(rest[0]) != width):
        raise ArtifactError(f"{where}: expected a constant of {width} bits, found {rest[0]}")
    return value % (1 << width)


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
        right = sizes[0] == sizes[1] and (not of[0].index or op in ("eq", "neq"))
    else:
        right = not any(node.index for node in of)
    if not right:
        raise ArtifactError(f"{where}: {op} does not take {', '.join(map(_shown, of))}")


def _shown(node):
    return f"{node.width} bits" if not node.index else f"an array of {node.width} bits by {node.index}"
