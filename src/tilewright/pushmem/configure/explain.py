"""Why there is no configuration: a least set of outputs that none gives, checked.

Without one of them the others have a configuration; together they have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.solve import UNKNOWN, UNSAT, Solver, TimeOver
from tilewright.pushmem.configure.system import System
from tilewright.pushmem.configure.unroll import Unrolled

# Seconds for making a set smaller, where no limit is stated.
LIMIT_S = 20.0
# Of a cause in words: what it asks for, at most.
SHOWN = 4


@dataclass(frozen=True)
class Cause:
    """asked: ``[(signal, cycle, word)]`` that no configuration gives together. least: whether each of them is needed,
    as far as was checked in time."""

    asked: list[tuple[str, int, int]]
    least: bool

    def text(self) -> str:
        """In words."""
        shown = "; ".join(f"{signal} is {word} in cycle {cycle}" for signal, cycle, word in self.asked[:SHOWN])
        rest = f"; and {len(self.asked) - SHOWN} more" if len(self.asked) > SHOWN else ""
        return f"no configuration gives all of: {shown}{rest}"


def cause(
    system: System, example: Example, fixed: Mapping[str, int] | None = None, limit_s: float | None = None
) -> Cause | None:
    """The `Cause` of an example that has no configuration; None where none was found in time, or where there is one.

    What is pinned in an example is asked for without being taken for granted, so that each is by itself.
    """
    try:
        return _cause(system, example, fixed, perf_counter() + (LIMIT_S if limit_s is None else limit_s))
    except TimeOver:
        return None


def _cause(system, example, fixed, end):
    plain = Example(example.cycles, example.inputs, {**example.outputs, **example.pins})
    solver = Solver(max(0.0, end - perf_counter()))
    unrolled = Unrolled(system, plain, solver, fixed)
    if unrolled.refuted:
        name, cycle, _ = unrolled.refuted[0]
        return Cause([(name, cycle, plain.outputs[name][cycle])], True)
    kept = list(range(len(unrolled.asked)))
    if solver.check(*(unrolled.asked[at][2] for at in kept)) != UNSAT:
        return None
    kept = [kept[place] for place in solver.blamed()]
    least = True
    for at in list(kept):
        if at not in kept:
            continue
        smaller = [each for each in kept if each != at]
        result = solver.check(*(unrolled.asked[each][2] for each in smaller))
        if result == UNSAT:
            blamed = set(solver.blamed())
            kept = [each for place, each in enumerate(smaller) if place in blamed]
        elif result == UNKNOWN:
            least = False
            break
    asked = [unrolled.asked[at][:2] for at in kept]
    return Cause([(name, cycle, plain.outputs[name][cycle]) for name, cycle in asked], least)
