"""Components in turn: what one finds is given to the next, and no answer breaks what another asks for."""

from helpers import extras
from tilewright.pushmem.configure import modular, query
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.modular import Component
from tilewright.pushmem.configure.objectives import Least
from tilewright.pushmem.configure.system import Builder

extras.need("bitwuzla")


def bounded(name, low, high, *, word="x", layers=()):
    """A component whose shared word is at least `low` and below `high`; it has a word of its own, too, which is the
    shared one's neighbour."""
    b = Builder(name)
    shared, own = b.parameter(word, 4), b.parameter(f"{name}_own", 4)
    b.output("low", shared.below(low))
    b.output("high", shared.below(high))
    b.output("next", own - shared)
    return Component(name, b.system, Example(1, {}, {"low": [0], "high": [1], "next": [1]}), layers)


LEAST = (Least("x", [[("x", 0)]]),)


def test_what_one_finds_is_given_to_the_next():
    found = modular.solve([bounded("a", 3, 9, layers=LEAST), bounded("b", 1, 9)])
    assert found.verdict == query.SOLVED and list(found.seconds) == ["a", "b"]
    assert found.registers == {"x": 3, "a_own": 4, "b_own": 4}


def test_components_before_keep_to_what_a_later_one_chooses():
    # The first would take 3, the last needs 6 or 7; both of those before it follow.
    found = modular.solve([bounded("a", 3, 9, layers=LEAST), bounded("b", 2, 9), bounded("c", 6, 8, layers=LEAST)])
    assert found.verdict == query.SOLVED
    assert found.registers == {"x": 6, "a_own": 7, "b_own": 7, "c_own": 7}
    assert [answer.registers["x"] for answer in found.by_name.values()] == [6, 6, 6]


def test_components_that_contradict_each_other_have_no_answer():
    found = modular.solve([bounded("a", 1, 3), bounded("b", 5, 8)])
    assert found.verdict == query.GAVE_UP and found.registers == {}


def test_a_component_without_any_configuration_is_infeasible():
    found = modular.solve([bounded("a", 1, 3), bounded("b", 5, 5), bounded("c", 1, 3)])
    assert found.verdict == query.INFEASIBLE and list(found.by_name) == ["a", "b"]
    assert {signal for signal, _, _ in found.by_name["b"].cause.asked} == {"low", "high"}


def test_words_of_its_own_are_not_fixed_by_others():
    found = modular.solve([bounded("a", 3, 4, word="x"), bounded("b", 7, 8, word="y")])
    assert found.registers == {"x": 3, "a_own": 4, "y": 7, "b_own": 8}


def test_traces_and_layers_may_follow_from_what_is_known():
    first, second = bounded("a", 5, 6), bounded("b", 1, 9)
    known = []

    def example(registers):
        known.append(dict(registers))
        return Example(1, {}, {"next": [registers["x"] - 2]})

    found = modular.solve([first, Component("b", second.system, example, lambda registers: LEAST)])
    assert known == [{"x": 5, "a_own": 6}] and found.registers["b_own"] == 8
    assert found.by_name["b"].layers == {"x": 5}


def test_a_component_that_shares_nothing_replaces_what_is_known():
    alone = bounded("b", 7, 8)
    found = modular.solve([bounded("a", 3, 4), Component("b", alone.system, alone.example, shared=False)])
    assert found.verdict == query.SOLVED and found.registers["x"] == 7


def test_time_is_that_of_all_components():
    found = modular.solve([bounded("a", 3, 4)], limit_s=0.0)
    assert found.verdict == query.GAVE_UP and found.registers == {}
