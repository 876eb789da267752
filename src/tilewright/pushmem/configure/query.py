"""The question: is there a configuration with which a system gives an example's outputs, and which is the least?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tilewright.core import deadline
from tilewright.core.errors import SolverError
from tilewright.pushmem.configure import explain, objectives, replay
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.solve import SAT, UNKNOWN, Solver, TimeOver
from tilewright.pushmem.configure.system import System
from tilewright.pushmem.configure.unroll import Unrolled

# Seconds of choices without an answer after which the question is asked without choices; for how many times as long
# as they took; and after how many times as long it is asked again.
PATIENCE_S, ALONE, AGAIN = 8.0, 2.0, 8.0
SOLVED, INFEASIBLE, GAVE_UP = "solved", "infeasible", "unknown"


@dataclass
class Answer:
    """verdict: `SOLVED`, `INFEASIBLE` or `GAVE_UP`. registers: the configuration, by name. layers, seconds: of each
    layer its value and how long it took; ``first`` is the time to the first configuration. cause: why there is none.
    complete: whether every layer is known to be least. replayed: cycles of the interpreter's run."""

    verdict: str
    registers: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cause: explain.Cause | None = None
    complete: bool = True
    replayed: int = 0


def solve(
    system: System,
    example: Example,
    *,
    layers: Sequence[objectives.Choices | objectives.Least] = (),
    fixed: Mapping[str, int] | None = None,
    limit_s: float | None = None,
    explained: bool = True,
) -> Answer:
    """Find the configuration of a system that gives an example.

    Parameters
    ----------
    system : System
        Of `btor2.read`.
    example : Example
        Words of inputs and outputs.
    layers : sequence of Least or Choices
        Objectives, minimised in this order; a `Choices` comes first.
    fixed : dict, optional
        Known configuration words by name.
    limit_s : float, optional
        Time limit in seconds.
    explained : bool
        Look for a cause if there is no configuration.

    Returns
    -------
    Answer
        ``verdict`` is ``solved``, ``infeasible`` (a proof) or ``unknown``; ``registers`` has the configuration words.
        At the time limit the verdict is ``unknown``, or ``solved`` without all objectives.

    Raises
    ------
    ConfigError
        For an example of another system.
    SolverError
        For an answer that the interpreter refutes.
    """

    def ask():
        yield _solve(system, example, layers, fixed, limit_s, explained)

    return deadline.last(ask, limit_s) or Answer(GAVE_UP, complete=False)


def _solve(system, example, layers, fixed, limit_s, explained):
    example = example.constrained(system)
    example.check(system)
    fixed, end = dict(fixed or {}), None if limit_s is None else perf_counter() + limit_s
    enumerated = [layer for layer in layers if isinstance(layer, objectives.Choices)]
    combinations = enumerated[0].combinations(fixed) if enumerated else [(0, ())]
    alone: dict = {}
    begin, gave_up, patience = perf_counter(), False, PATIENCE_S
    for cost, taken in combinations:
        if end is not None and perf_counter() > end:
            gave_up = True
            break
        if any(alone.get(id(choice)) for choice in taken):
            continue
        solver = Solver(deadline.left(end))
        known = dict(fixed)
        for choice in taken:
            known |= choice.fixed
        try:
            unrolled = Unrolled(system, example, solver, known)
            if unrolled.refuted:
                # One of them alone may be what numbers refute: then so is every other combination with it.
                for choice in taken if len(taken) > 1 else ():
                    if id(choice) not in alone:
                        alone[id(choice)] = bool(Unrolled(system, example, solver, fixed | dict(choice.fixed)).refuted)
                continue
        except TimeOver:
            gave_up = True
            break
        _require(solver, unrolled, taken)
        result = solver.check()
        gave_up |= result == UNKNOWN
        if result == SAT:
            seconds = {"first": perf_counter() - begin}
            found = {enumerated[0].name: cost} if enumerated else {}
            return _least(system, example, solver, unrolled, layers, found, seconds, complete=not gave_up)
        # Choices only restrict: what has no answer without them has none with any, and may be far sooner refuted.
        spent = perf_counter() - begin
        if enumerated and spent >= patience:
            patience = AGAIN * spent
            left = ALONE * spent if end is None else min(ALONE * spent, end - perf_counter())
            cause = explain.cause(system, example, fixed, left)
            if cause is not None:
                if explained and not cause.least:
                    cause = explain.cause(system, example, fixed, deadline.left(end)) or cause
                return Answer(INFEASIBLE, seconds={"first": perf_counter() - begin}, cause=cause if explained else None)
    seconds = {"first": perf_counter() - begin}
    if gave_up:
        return Answer(GAVE_UP, seconds=seconds, complete=False)
    cause = explain.cause(system, example, fixed, deadline.left(end)) if explained else None
    return Answer(INFEASIBLE, seconds=seconds, cause=cause)


def _require(solver, unrolled, taken):
    for _, _, truth in unrolled.asked:
        solver.require(truth)
    for choice in taken:
        for name, least in choice.least.items():
            word = unrolled.words.get(name)
            if least and word is not None and not isinstance(word, int):
                solver.require(solver.at_least(word, least))


def _least(system, example, solver, unrolled, layers, found, seconds, complete):
    """The least of all configurations, which the interpreter has run."""
    # Words that decide nothing are 0.
    words = dict.fromkeys(system.configuration, 0) | unrolled.words
    registers = {name: word if isinstance(word, int) else solver.found(word) for name, word in words.items()}
    for layer in layers:
        if isinstance(layer, objectives.Choices):
            continue
        begin = perf_counter()
        value, registers = objectives.minimised(
            solver, layer, {**words, **unrolled.fixed}, {**registers, **unrolled.fixed}
        )
        seconds[layer.name] = perf_counter() - begin
        if value is None:
            complete = False
            break
        found[layer.name] = value
    registers = {name: {**registers, **unrolled.fixed}[name] for name in system.configuration}
    names = [*example.outputs, *example.pins]
    broken = example.broken(replay.run(system, registers, example.inputs, example.cycles, names))
    if broken is not None:
        raise SolverError(f"{system.name}: the interpreter refutes the solver's answer: {broken}")
    return Answer(SOLVED, registers, found, seconds, complete=complete, replayed=example.cycles)
