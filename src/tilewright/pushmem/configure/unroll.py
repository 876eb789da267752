"""A system's signals in each cycle as terms over its configuration, which is the same in all cycles.

What follows from constants is a number, by the interpreter's own operators. Where an example tells a signal (`pins`),
that is asked for, and the signal is that number from then on: sound, since it is asked for, and most of what would
follow from it need never be built.
"""

from collections.abc import Mapping

from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.solve import Solver, Term
from tilewright.pushmem.configure.system import System
from tilewright.pushmem.configure.words import ARRAYS, OPERATORS


class Unrolled:
    """`system` over the cycles of `example`, with the words `fixed` of its configuration.

    start: words or arrays that states begin with, by their nodes, in place of their first values. words: terms or
    numbers of the configuration by name. asked: ``[(signal, cycle, truth)]``, truth a term; what an example asks for
    and is a number already is left out, or listed in `refuted`, ``[(signal, cycle, found)]``. Raises `solve.TimeOver`.
    """

    def __init__(
        self,
        system: System,
        example: Example,
        solver: Solver,
        fixed: Mapping[str, Term] | None = None,
        start: Mapping[int, Term] | None = None,
    ):
        self.system, self.example, self.solver, self.fixed = system, example, solver, dict(fixed or {})
        self.start = start or {}
        self.words: dict = {}
        self.asked: list = []
        self.refuted: list = []
        names = [*example.outputs, *example.pins]
        self.needed = system.needed(names)
        self._unroll({name: system.node(name) for name in names})

    def _unroll(self, signals):
        nodes, states = self.system.nodes, {state.node: state for state in self.system.states.values()}
        values, steps, moving = {}, [], []
        pinned: dict = {}
        told: dict = {}
        for name, number in signals.items():
            for kind, found in ((self.example.pins, pinned), (self.example.outputs, told)):
                if name in kind:
                    found.setdefault(number, []).append((name, kind[name]))
        for number in self.needed:
            node = nodes[number]
            if node.op == "const":
                values[number] = node.numbers[0]
            elif node.op == "parameter":
                values[number] = self.words[node.name] = self._word(node)
            elif node.op == "input":
                moving.append((number, self.example.inputs.get(node.name)))
            elif node.op != "state":
                steps.append((number, node))
        changing = self._changing(steps, states)
        for number, node in steps:
            if number not in changing:
                values[number] = self._apply(node, [values[arg] for arg in node.args])
        steps = [(number, node) for number, node in steps if number in changing]
        kept = [number for number in self.needed if number in states]
        for number in self.system.starting(self.needed):
            if number in states:
                init = states[number].init
                begin = self._zero(nodes[number]) if init is None else values[init]
                values[number] = self.start.get(number, begin)
            elif number not in values:
                values[number] = self._apply(nodes[number], [values[arg] for arg in nodes[number].args])
        for cycle in range(self.example.cycles):
            self.solver.in_time()
            for number, column in moving:
                values[number] = 0 if column is None else column[cycle]
            for number in kept:
                self._pin(values, number, cycle, pinned.get(number))
            for number, node in steps:
                values[number] = self._apply(node, [values[arg] for arg in node.args])
                if number in pinned:
                    self._pin(values, number, cycle, pinned[number])
            for number, columns in told.items():
                for name, column in columns:
                    if column[cycle] is not None:
                        self._ask(name, cycle, values[number], column[cycle])
            following = [(number, states[number].next) for number in kept]
            for number, value in [(number, values[at]) for number, at in following if at is not None]:
                values[number] = value

    def _changing(self, steps, states):
        """Nodes whose values are not the same in all cycles."""
        found = {number for number in self.needed if self.system.nodes[number].op in ("input", "state")}
        for number, node in steps:
            if not found.isdisjoint(node.args):
                found.add(number)
        return found

    def _word(self, node):
        if node.name in self.fixed:
            return self.fixed[node.name]
        return self.solver.unknown(node.name, node.width)

    def _zero(self, node):
        # ASSUME: a state without a first value begins at 0, as in a simulator.
        return self.solver.array(node.index, node.width, self.solver.value(0, node.width)) if node.index else 0

    def _pin(self, values, number, cycle, columns):
        for name, column in columns or ():
            if column[cycle] is not None:
                self._ask(name, cycle, values[number], column[cycle])
                values[number] = column[cycle]

    def _ask(self, name, cycle, value, wanted):
        if not isinstance(value, int):
            self.asked.append((name, cycle, self.solver.equal(value, wanted)))
        elif value != wanted:
            self.refuted.append((name, cycle, value))

    def _apply(self, node, args):
        """The value of a node: a number where its arguments are, or where one of them decides it."""
        op, nodes = node.op, self.system.nodes
        if op not in ARRAYS and all(isinstance(arg, int) for arg in args):
            return OPERATORS[op](node, *args)
        if (short := _decided(node, args)) is not None:
            return short
        if op == "fill":
            return self.solver.array(node.index, node.width, self._term(args[0], node.width))
        terms = []
        for place, (arg, number) in enumerate(zip(args, node.args, strict=True)):
            width = nodes[number].width
            if op in ("read", "write") and place:
                width = nodes[node.args[0]].index if place == 1 else node.width
            terms.append(self._term(arg, width))
        return self.solver.apply(node, terms)

    def _term(self, value, width):
        return self.solver.value(value, width) if isinstance(value, int) else value


def _decided(node, args):
    """The value where constants among `args` leave no choice, else None."""
    op, full = node.op, (1 << node.width) - 1
    if op == "ite":
        if isinstance(args[0], int):
            return args[1] if args[0] else args[2]
        return args[1] if args[1] is args[2] or _same(args[1], args[2]) else None
    if op in ("uext", "sext") and node.width == node.numbers[0]:
        return args[0]
    if op not in ("and", "or", "add", "sub", "xor") or node.index:
        return None
    for one, other in (args, args[::-1]):
        if not isinstance(one, int):
            continue
        if op == "and" and one == 0:
            return 0
        if (op == "and" and one == full) or (op in ("or", "add", "xor") and one == 0):
            return other
        if op == "or" and one == full:
            return full
    return args[0] if op == "sub" and isinstance(args[1], int) and args[1] == 0 else None


def _same(one, other):
    return isinstance(one, int) == isinstance(other, int) and (
        one == other if isinstance(one, int) else one.id() == other.id()
    )
