"""Small systems: verdict, optimum and cause are those of a search through all configurations."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.systems import CYCLES, MINIS, checked
from tilewright.pushmem.configure import query, replay
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.objectives import Choices

extras.need("bitwuzla")


@functools.cache
def every(name):
    """All configurations of a system, the values of its layers, and, where it has no inputs, its runs."""
    mini = MINIS[name]
    words = mini.configurations()
    return words, mini.values(words), None if mini.given else mini.run(words, {})


@st.composite
def examples(draw, name):
    """``(example, runs)``: of some configuration, with parts left out, and a few words altered."""
    mini = MINIS[name]
    words, _, runs = every(name)
    inputs = {
        key: draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=CYCLES, max_size=CYCLES))
        for key, bits in mini.given.items()
    }
    runs = runs or mini.run(words, inputs)
    at = draw(st.integers(0, len(next(iter(words.values()))) - 1))
    told = {}
    for key, bits in mini.signals.items():
        column = runs[key][:, at].tolist()
        for cycle in draw(st.lists(st.integers(0, CYCLES - 1), max_size=2)):
            column[cycle] = draw(st.integers(0, (1 << bits) - 1))
        kept = (
            draw(st.lists(st.booleans(), min_size=CYCLES, max_size=CYCLES)) if draw(st.booleans()) else [True] * CYCLES
        )
        told[key] = [word if keep else None for word, keep in zip(column, kept, strict=True)]
    if mini.pins and not draw(st.booleans()):
        told = {key: column for key, column in told.items() if key not in mini.pins}
    outputs = {key: column for key, column in told.items() if key not in mini.pins}
    return Example(CYCLES, inputs, outputs, {key: told[key] for key in mini.pins if key in told}), runs


def suits(runs, asked):
    """Whether each configuration gives all of ``[(signal, cycle, word)]``."""
    found = np.ones(next(iter(runs.values())).shape[1], bool)
    for name, cycle, word in asked:
        found &= runs[name][cycle] == word
    return found


def asked(example):
    """What an example asks for."""
    columns = {**example.outputs, **example.pins}
    return [(name, at, word) for name, column in columns.items() for at, word in enumerate(column) if word is not None]


def check(name, example, runs):
    """The answer to an example is that of the search, and returned."""
    mini = MINIS[name]
    words, values, _ = every(name)
    given = suits(runs, asked(example))
    # Where loops are chosen, a configuration that no choice allows does not count.
    allowed = given & np.all([value >= 0 for value in values], axis=0)
    answer = query.solve(mini.system, example, layers=mini.layers)
    if not allowed.any():
        assert answer.verdict == query.INFEASIBLE
        # A cause explains why no configuration is right; of those that no choice allows it does not tell.
        assert (answer.cause is None) == given.any()
        if answer.cause is not None:
            least(example, answer.cause, runs, mini.system)
        return answer
    assert answer.verdict == query.SOLVED and answer.complete and answer.replayed == CYCLES
    best = min(zip(*(value[allowed].tolist() for value in values), strict=True))
    assert tuple(answer.layers.values()) == best
    found = np.all([words[key] == word for key, word in answer.registers.items()], axis=0)
    assert found.sum() == 1 and allowed[found].all()
    return answer


def least(example, cause, runs, system):
    """A cause is part of what was asked for, has no configuration, and with one thing less it has one."""
    assert cause.least and set(cause.asked) <= set(asked(example))
    assert not suits(runs, cause.asked).any()
    for at in range(len(cause.asked)):
        assert suits(runs, cause.asked[:at] + cause.asked[at + 1 :]).any()
    assert checked(system, example, cause)


# Without patience, what has no answer is refuted before all loops are tried.
@pytest.mark.parametrize("patience", [query.PATIENCE_S, 0.0])
@pytest.mark.parametrize("name", MINIS)
def test_verdict_optimum_and_cause_are_those_of_a_search(name, patience, monkeypatch):
    monkeypatch.setattr(query, "PATIENCE_S", patience)
    monkeypatch.setattr(query, "AGAIN", 0.0)
    verdicts = []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(examples(name))
    def run(drawn):
        verdicts.append(check(name, *drawn).verdict)

    run()
    # Both kinds were among them.
    assert min(verdicts.count(verdict) for verdict in (query.SOLVED, query.INFEASIBLE)) > 5


@pytest.mark.parametrize("name", MINIS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_interpreter_runs_as_the_search_does(name, data):
    mini = MINIS[name]
    words, _, _ = every(name)
    at = data.draw(st.integers(0, len(next(iter(words.values()))) - 1))
    example, runs = data.draw(examples(name))
    registers = {key: int(column[at]) for key, column in words.items()}
    found = replay.run(mini.system, registers, example.inputs, CYCLES, list(mini.signals))
    assert found == {key: runs[key][:, at].tolist() for key in mini.signals}


def test_a_configuration_that_is_known_in_part_is_kept():
    mini, words = MINIS["pwm"], every("pwm")[0]
    runs = every("pwm")[2]
    at = int(np.flatnonzero((words["period"] == 5) & (words["duty"] == 3) & (words["phase"] == 9))[0])
    example = Example(CYCLES, {}, {"out": runs["out"][:, at].tolist()})
    answer = query.solve(mini.system, example, layers=mini.layers, fixed={"phase": 9})
    right = suits(runs, asked(example)) & (words["phase"] == 9)
    assert answer.registers["phase"] == 9
    assert answer.layers["area"] == ((words["period"] + 1) * words["duty"])[right].min()


def test_every_layer_of_choices_is_checked_against_all_configurations():
    # The search would agree with anything if no configuration were allowed.
    words, values, _ = every("generator")
    layer = next(layer for layer in MINIS["generator"].layers if isinstance(layer, Choices))
    assert layer.name == "levels"
    assert {0, 1, 2} <= set(values[0].tolist()) and len(words["start"]) == 1 << 12
