"""Components of a system, configured one after the other: what one has found, those behind it are given.

A component sees a part of the registers. What it shares with those before it is fixed; where it then has no
configuration, it is asked once more with its own choice of them, and the answers before it that say otherwise are
dropped and asked anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tilewright.configure import query
from tilewright.configure.example import Example
from tilewright.configure.system import System

Layers = Sequence


@dataclass(frozen=True)
class Component:
    """name: of the component. system, example, layers: as `query.solve` takes them; example and layers may be functions
    of the registers that are known by then. fixed: registers that are known beforehand. shared: whether registers of
    components before it are fixed."""

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
    """The `Answers` of components, in their order. Ends at the first without a configuration."""
    end = None if limit_s is None else perf_counter() + limit_s
    registers, answers, seconds = {}, {}, {}
    for component in components:
        begin = perf_counter()
        answer = _asked(component, registers if component.shared else {}, end)
        if (
            answer.verdict == query.INFEASIBLE
            and component.shared
            and set(registers) & set(component.system.configuration)
        ):
            answer = _asked(component, {}, end)
        answers[component.name], seconds[component.name] = answer, perf_counter() - begin
        if answer.verdict != query.SOLVED:
            return Answers(answer.verdict, registers, answers, seconds)
        registers |= answer.registers
    return Answers(query.SOLVED, registers, answers, seconds)


def _asked(component, known, end):
    shared = {name: value for name, value in known.items() if name in component.system.configuration}
    example, layers = (each(known) if callable(each) else each for each in (component.example, component.layers))
    left = None if end is None else max(0.0, end - perf_counter())
    return query.solve(component.system, example, layers=layers, fixed={**shared, **component.fixed}, limit_s=left)
