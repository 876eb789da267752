"""Statements for all inputs: is there a configuration with which no run of a system breaks what is asked for?

A run is free in its inputs and in the first values that a design leaves open. What is asked for are the design's `bad`
states, which must not occur, and an example's outputs; a run counts as long as all constraints hold.

Counterexamples decide: a configuration that is right for all of them is sought, then a run that breaks it. Such a run
is the next one that a configuration has to stand. Where the solver finds none, the configuration is right for so many
cycles, and by induction for all. Every "no" of the solver is written down in SMT-LIB, and asked of another one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

from tilewright.core import deadline
from tilewright.core.errors import ConfigError, SolverError
from tilewright.pushmem.configure import objectives, replay, smtlib
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.query import GAVE_UP, INFEASIBLE, SOLVED
from tilewright.pushmem.configure.solve import SAT, UNKNOWN, Solver, TimeOver
from tilewright.pushmem.configure.system import System, some
from tilewright.pushmem.configure.unroll import Unrolled

# Runs of random words, by the interpreter, of a configuration that was found.
RUNS = 16
# Of a cause in words: words that it shows, at most.
SHOWN = 6
# Why there is no answer.
OVER = "the time is over"


@dataclass(frozen=True)
class Run:
    """inputs: words by name, one a cycle. begin: first words of states that have none of their own."""

    inputs: Mapping[str, Sequence[int]]
    begin: Mapping[str, int]


@dataclass
class Answer:
    """verdict: `SOLVED`, `INFEASIBLE` or `GAVE_UP`. registers: the configuration. layers: their least values.

    runs: the counterexamples; of `INFEASIBLE` a least set of those that no configuration stands; rounds: how many there
    were. cycles: of a run. depth: of the induction, None where only these cycles were asked for. why: in words, where
    there is no answer. questions: ``{name: SMT-LIB}`` of what has no answer, each `unsat`; confirmed: what another
    solver says of them. replayed: cycles that the interpreter ran.
    """

    verdict: str
    registers: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    rounds: int = 0
    cycles: int = 0
    depth: int | None = None
    why: str = ""
    questions: dict[str, str] = field(default_factory=dict)
    confirmed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    replayed: int = 0


def solve(
    system: System,
    example: Example,
    free: str,
    *,
    layers: Sequence[objectives.Least] = (),
    fixed: Mapping[str, int] | None = None,
    always: bool = False,
    limit_s: float | None = None,
) -> Answer:
    """Find a configuration that is right for all words of some inputs.

    Parameters
    ----------
    system : System
        Of `btor2.read`.
    example : Example
        Its cycles, the words of the other inputs, and outputs that every run has to give.
    free : str
        Regular expression. Inputs whose whole names match it may have any words.
    layers : sequence of Least
        Objectives, minimised in this order.
    fixed : dict, optional
        Known configuration words by name.
    always : bool
        Prove it for all cycles, by induction. The other inputs then keep their last words.
    limit_s : float, optional
        Time limit in seconds.

    Returns
    -------
    Answer
        Of a least configuration; `infeasible` where no configuration exists.

    Raises
    ------
    ConfigError
        For an example of another system, for inputs that do not exist, where nothing is asked for.
    """
    begin = perf_counter()
    if always and not system.bad:
        raise ConfigError(f"{system.name}: expected an assertion (bad), of which all cycles are asked, found none")

    def ask():
        question = _Question(system, example, free, dict(fixed or {}), limit_s)
        try:
            yield question.answer(layers, always)
        except TimeOver:
            yield Answer(GAVE_UP, why=OVER, runs=question.runs, rounds=len(question.runs))

    answer = deadline.last(ask, limit_s) or Answer(GAVE_UP, why=OVER)
    answer.cycles, answer.seconds = example.cycles, perf_counter() - begin
    return answer


class _Question:
    def __init__(self, system, example, free, fixed, limit_s):
        example.check(system)
        self.system, self.fixed, self.runs, self.draw = system, fixed, [], Random(0)
        self.end = None if limit_s is None else perf_counter() + limit_s
        names = _matched(system, free)
        if told := [name for name in names if name in example.inputs]:
            raise ConfigError(f"expected an example without the inputs that may be any, found {some(told)}")
        asked = {**example.pins, **example.outputs}
        if not system.bad and not asked:
            raise ConfigError(
                f"{system.name}: expected an assertion (bad) or an output of an example, to ask for, found none"
            )
        asked |= {name: [0] * example.cycles for name in system.bad}
        self.example = Example(example.cycles, example.inputs, asked).constrained(system)
        needed = set(system.needed(self.example.outputs))
        self.free = [name for name in names if system.inputs[name] in needed]
        self.decisive = [name for name, number in system.configuration.items() if number in needed]
        self.states = [(name, state) for name, state in system.states.items() if state.node in needed]
        self.open = [name for name, state in self.states if state.init is None]
        for name in self.open:
            if system.nodes[system.states[name].node].index:
                raise ConfigError(f"{system.name}: expected first words of the memory {name}, found none")

    def answer(self, layers, always):
        """The `Answer`, but for cycles and seconds. Raises `TimeOver`."""
        now: Sequence = ()
        while True:
            registers, values = self._candidate(now)
            if registers is None:
                return self._none()
            run = self._counterexample(registers)
            if run is not None:
                self.runs.append(run)
            elif now != layers:
                now = layers
            else:
                return self._right(registers, values, always)

    def _candidate(self, layers):
        """``(registers, values of the layers)`` that stand all runs so far; ``(None, {})`` where none do."""
        solver = self._solver()
        words = self._required(solver)
        for run in self.runs:
            solver.require(self._stood(solver, words, run))
        if self._asked(solver) != SAT:
            return None, {}
        words = {name: words[name] if name in self.decisive or name in self.fixed else 0 for name in words}
        registers, values = {name: _number(solver, word) for name, word in words.items()}, {}
        for layer in layers:
            value, registers = objectives.minimised(solver, layer, words, registers)
            if value is None:
                raise TimeOver
            values[layer.name] = value
        return registers, values

    def _counterexample(self, registers):
        """A `Run` that a configuration does not stand, None where there is none."""
        # Most wrong ones break soon, which a solver may take long to see.
        for run in (self._drawn() for _ in range(RUNS)):
            if self._wrong(registers, run):
                return run
        solver = self._solver()
        run = self._any(solver, self.example.cycles)
        for _, broken in self._broken(solver, registers, run):
            if self._asked(solver, broken) == SAT:
                inputs = {name: [solver.found(word) for word in column] for name, column in run.inputs.items()}
                return Run(inputs, {name: solver.found(word) for name, word in run.begin.items()})
        return None

    def _right(self, registers, values, always):
        """The answer of a configuration that no run breaks."""
        text = smtlib.Text()
        run = self._any(text, self.example.cycles)
        text.require(text.any_of([broken for _, broken in self._broken(text, registers, run)]))
        answer = Answer(SOLVED, registers, values, self.runs, len(self.runs), questions={"runs": text.written()})
        runs = [*self.runs, *(self._drawn() for _ in range(RUNS))]
        for wrong in filter(None, (self._wrong(registers, run) for run in runs)):
            raise SolverError(f"{self.system.name}: the interpreter refutes the solver's answer: {wrong}")
        answer.replayed = len(runs) * self.example.cycles
        if always:
            answer.depth, step = self._induction(registers)
            if answer.depth is None:
                answer.verdict = GAVE_UP
                answer.why = f"right for {self.example.cycles} cycles; no induction of so many cycles proves it for all"
            else:
                answer.questions["induction"] = step
        return answer

    def _none(self):
        """The answer where no configuration stands the runs so far: a least set of them."""
        solver = self._solver()
        words = self._required(solver)
        truths = [self._stood(solver, words, run) for run in self.runs]
        kept = list(range(len(truths)))
        for dropped in [None, *kept]:
            left = [each for each in kept if each != dropped]
            if dropped in kept or dropped is None:
                if self._asked(solver, *(truths[each] for each in left)) == SAT:
                    continue
                blamed = set(solver.blamed())
                kept = [each for place, each in enumerate(left) if place in blamed]
        text, runs = smtlib.Text(), [self.runs[each] for each in kept]
        words = self._required(text)
        for run in runs:
            text.require(self._stood(text, words, run))
        why = f"no configuration lets the constraints hold for {self.example.cycles} cycles"
        if runs:
            which = "a run" if len(runs) == 1 else f"{len(runs)} runs together, of which the first has"
            why = f"no configuration is right for {which}: {shown(runs[0])}"
        questions = {"none": text.written()}
        return Answer(INFEASIBLE, runs=runs, rounds=len(self.runs), why=why, questions=questions)

    def _required(self, solver):
        """Words of the configuration, with which some run at least meets the constraints in all cycles."""
        words = {name: solver.unknown(name, self.system.width(name)) for name in self.system.configuration}
        words |= self.fixed
        if self.system.constraints:
            run = self._any(solver, self.example.cycles)
            held = [truth for constraints, _ in self._moments(solver, words, run) for truth in constraints]
            solver.require(solver.all_of(held))
        return words

    def _stood(self, solver, words, run):
        """The truth that a run breaks nothing."""
        return solver.negated(solver.any_of([broken for _, broken in self._broken(solver, words, run)]))

    def _broken(self, solver, words, run, **more) -> Iterator[tuple[int, Any]]:
        """``(cycle, truth)``: the constraints have held so far, and now something is not as asked for."""
        held: list = []
        for cycle, (constraints, asked) in enumerate(self._moments(solver, words, run, **more)):
            held += constraints
            if asked:
                yield cycle, solver.all_of([*held, solver.negated(solver.all_of(asked))])

    def _moments(self, solver, words, run, example=None, start=None):
        """``[(constraints, what is asked for)]`` of each cycle: truths, without those that hold anyway."""
        example = example or self.example
        example = Example(example.cycles, {**example.inputs, **run.inputs}, example.outputs)
        first = {self.system.states[name].node: word for name, word in (start or run.begin).items()}
        unrolled = Unrolled(self.system, example, solver, words, first)
        found: list = [([], []) for _ in range(example.cycles)]
        refuted = ((name, cycle, solver.any_of([])) for name, cycle, _ in unrolled.refuted)
        for name, cycle, truth in [*unrolled.asked, *refuted]:
            found[cycle][name not in self.system.constraints].append(truth)
        return found

    def _any(self, solver, cycles):
        """A `Run` of words that may be any."""
        width = self.system.width
        inputs = {name: [solver.unknown(f"{name}@{t}", width(name)) for t in range(cycles)] for name in self.free}
        return Run(inputs, {name: solver.unknown(f"{name}@begin", width(name)) for name in self.open})

    def _induction(self, registers):
        """``(depth, SMT-LIB)``: so many cycles without a break, from any states, have none after them."""
        steady = self._steady()
        last = {name: column[-1] for name, column in self.example.inputs.items()}
        for depth in range(1, steady + 1):
            cycles = depth + 1
            asked = dict.fromkeys(self.system.bad, [0] * cycles) | dict.fromkeys(self.system.constraints, [1] * cycles)
            example = Example(cycles, {name: [word] * cycles for name, word in last.items()}, asked)
            solver, text = self._solver(), smtlib.Text()
            for each in (solver, text):
                nodes = {name: self.system.nodes[state.node] for name, state in self.states}
                start = {name: each.unknown(f"{name}@begin", node.width, node.index) for name, node in nodes.items()}
                broken = dict(self._broken(each, registers, self._any(each, cycles), example=example, start=start))
                now = broken.pop(depth, each.any_of([]))
                each.require(each.all_of([now, *map(each.negated, broken.values())]))
            if self._asked(solver) != SAT:
                return depth, text.written()
        return None, ""

    def _steady(self):
        """For how many of the last cycles the inputs of the example are what they are at last."""
        for back in range(1, self.example.cycles + 1):
            if any(column[-back] != column[-1] for column in self.example.inputs.values()):
                return back - 1
        return self.example.cycles

    def _drawn(self):
        """A `Run` of random words."""
        draw, width, cycles = self.draw.getrandbits, self.system.width, range(self.example.cycles)
        inputs = {name: [draw(width(name)) for _ in cycles] for name in self.free}
        return Run(inputs, {name: draw(width(name)) for name in self.open})

    def _wrong(self, registers, run):
        """What the interpreter finds otherwise than asked for in a run, in words, or None."""
        names, inputs = [*self.example.outputs], {**self.example.inputs, **run.inputs}
        found = replay.run(self.system, registers, inputs, self.example.cycles, names, run.begin)
        for cycle in range(self.example.cycles):
            wrong = [n for n in names if self.example.outputs[n][cycle] not in (None, found[n][cycle])]
            if wrong:
                return None if set(wrong) & set(self.system.constraints) else f"{wrong[0]} in cycle {cycle}"
        return None

    def _solver(self):
        return Solver(deadline.left(self.end))

    def _asked(self, solver, *assumed):
        """`SAT` or `UNSAT`. Raises `TimeOver`."""
        result = solver.check(*assumed)
        if result == UNKNOWN:
            raise TimeOver
        return result


def _matched(system, free):
    """Names of inputs that an expression matches."""
    try:
        names = [name for name in system.inputs if re.fullmatch(free, name)]
    except re.error as error:
        raise ConfigError(f"expected a regular expression, found {free!r}: {error}") from error
    if not names:
        raise ConfigError(
            f"{system.name}: expected inputs that match {free!r}, found none; inputs: {some(system.inputs)}"
        )
    return names


def _number(solver, word):
    return word if isinstance(word, int) else solver.found(word)


def shown(run: Run) -> str:
    """The first words of a run."""
    words = {**run.inputs, **{f"{name} at first": [word] for name, word in run.begin.items()}}
    return "; ".join(f"{name} is {', '.join(map(str, column[:SHOWN]))}" for name, column in [*words.items()][:SHOWN])
