"""Components of a system, configured one after the other: what one has found, those behind it are given.

A component sees a part of the registers. What it shares with those before it is fixed. Where it then has no
configuration it is asked once more, with its own choice; those before it have to keep to that choice, or nobody knows
an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tilewright.pushmem.configure import query
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.system import System

Layers = Sequence


@dataclass(frozen=True)
class Component:
    """name: of the component. system, example, layers: as `query.solve` takes them; example and layers may be functions
    of the registers that are known by then. fixed: registers that are known beforehand. shared: whether registers of
    components before it are fixed; where they are not, its own replace theirs, and its example has to ask for
    all that theirs did."""

    name: str
    system: System
    example: Example | Callable[[Mapping[str, int]], Example]
    layers: Layers | Callable[[Mapping[str, int]], Layers] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    shared: bool = True


@dataclass
class Answers:
    """verdict: of all. registers: of all components. by_name: their answers. seconds: of each."""

    verdict: str
    registers: dict[str, int]
    by_name: dict[str, query.Answer]
    seconds: dict[str, float]


def solve(components: Sequence[Component], *, limit_s: float | None = None) -> Answers:
    """The `Answers` of components, in their order. Ends at the first without a configuration.

    A component without one, whatever the others choose, is infeasible. Where two have configurations, but none was
    found that suits both, the verdict is `query.GAVE_UP`: other choices of both were not tried.
    """
    end = None if limit_s is None else perf_counter() + limit_s
    registers: dict = {}
    answers: dict = {}
    seconds: dict = {}
    for place, component in enumerate(components):
        begin = perf_counter()
        answer = _asked(component, registers if component.shared else {}, end)
        if (
            answer.verdict == query.INFEASIBLE
            and component.shared
            and set(registers) & set(component.system.configuration)
        ):
            answer = _asked(component, {}, end)
            if answer.verdict == query.SOLVED:
                registers, verdict = _again(components[:place], answer.registers, answers, end)
                if verdict != query.SOLVED:
                    answers[component.name], seconds[component.name] = answer, perf_counter() - begin
                    return Answers(query.GAVE_UP, {}, answers, seconds)
        answers[component.name], seconds[component.name] = answer, perf_counter() - begin
        if answer.verdict != query.SOLVED:
            return Answers(answer.verdict, registers, answers, seconds)
        registers |= answer.registers
    return Answers(query.SOLVED, registers, answers, seconds)


def _again(components, chosen, answers, end):
    """``(registers, verdict)`` of components with what a later one has chosen; their `answers` are replaced."""
    registers = dict(chosen)
    for component in components:
        answer = answers[component.name] = _asked(component, registers, end)
        if answer.verdict != query.SOLVED:
            return registers, answer.verdict
        registers |= answer.registers
    return registers, query.SOLVED


def _asked(component, known, end):
    shared = {name: value for name, value in known.items() if name in component.system.configuration}
    example, layers = (each(known) if callable(each) else each for each in (component.example, component.layers))
    left = None if end is None else max(0.0, end - perf_counter())
    return query.solve(component.system, example, layers=layers, fixed={**shared, **component.fixed}, limit_s=left)
