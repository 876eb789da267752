import random

import pytest

from helpers import systems
from tilewright.configure import explain, modular, query, replay
from tilewright.configure.example import Example
from tilewright.configure.objectives import Choice, Choices, Least
from tilewright.core.errors import ConfigError

pytest.importorskip("bitwuzla")

SUMS = {
    "pwm": [Least("period", [[("period", 0)]]), Least("duty", [[("duty", 0)]])],
    "generator": [
        Least("iterations", [[("last0", 1), ("last1", 1)]]),
        Least("steps", [[("step0", 0)], [("step1", 0)]]),
        Least("start", [[("start", 0)]]),
    ],
    "fifo": [Least("thresholds", [[("low", 0)], [("high", 0)]])],
}


def traced(of, registers, cycles, seed, masked=0.0, pinned=()):
    """What a configuration does with random inputs; some outputs are asked for no more."""
    draw = random.Random(seed)
    inputs = {name: [draw.randrange(1 << of.width(name)) for _ in range(cycles)] for name in of.inputs}
    found = replay.run(of, registers, inputs, cycles, list(of.outputs))
    outputs = {name: [None if draw.random() < masked else v for v in column] for name, column in found.items()}
    pins = {name: outputs.pop(name) for name in pinned}
    return Example(cycles, inputs, outputs, pins)


def least(of, layers, feasible):
    """The values of the layers, one after the other, by trying all."""
    values = []
    for layer in layers:
        values.append(min(layer.value(each) for each in feasible))
        feasible = [each for each in feasible if layer.value(each) == values[-1]]
    return values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("masked", [0.0, 0.6])
@pytest.mark.parametrize("name", ["pwm", "generator", "fifo"])
def test_the_optimum_is_that_of_trying_all(name, masked, seed):
    of = getattr(systems, name)()
    draw = random.Random(f"{name} {seed}")
    known = {word: draw.randrange(1 << of.width(word)) for word in of.configuration}
    pinned = ("fire",) if name == "generator" and seed == 1 else ()
    example = traced(of, known, 24, seed, masked, pinned)
    feasible = [each for each in systems.configurations(of) if systems.gives(of, example, each)]
    assert known in feasible
    answer = query.solve(of, example, layers=SUMS[name])
    assert answer.verdict == query.SOLVED and answer.complete and answer.replayed == 24
    assert answer.registers in feasible
    assert list(answer.layers.values()) == least(of, SUMS[name], feasible)


@pytest.mark.parametrize("name", ["pwm", "generator", "fifo"])
def test_the_verdict_is_that_of_trying_all(name):
    of = getattr(systems, name)()
    draw, infeasible = random.Random(name), 0
    for seed in range(12):
        known = {word: draw.randrange(1 << of.width(word)) for word in of.configuration}
        example = traced(of, known, 16, seed)
        column = next(iter(example.outputs.values()))
        for _ in range(2):
            at = draw.randrange(16)
            column[at] = column[at] ^ 1
        feasible = any(systems.gives(of, example, each) for each in systems.configurations(of))
        answer = query.solve(of, example)
        assert answer.verdict == (query.SOLVED if feasible else query.INFEASIBLE)
        if not feasible:
            infeasible += 1
            assert explain.checked(of, example, answer.cause)
            assert answer.cause.least and str(answer.cause.asked[0][1]) in answer.cause.text()
    assert infeasible


def test_a_cause_with_more_or_less_is_not_checked():
    of = systems.pwm()
    example = Example(3, {}, {"high": [0, 0, 1]})
    cause = query.solve(of, example).cause
    assert explain.checked(of, example, cause)
    more = explain.Cause(
        [*cause.asked, ("high", 1, 0)] if ("high", 1, 0) not in cause.asked else cause.asked[:-1], True
    )
    assert not explain.checked(of, example, more)


def test_choices_are_tried_the_least_first():
    of = systems.generator()
    example = Example(16, {}, {"fire": [int(cycle in (1, 3, 5, 7)) for cycle in range(16)]})
    choices = [
        Choice(0, {"last0": 0, "last1": 0}, {}),
        Choice(1, {"last1": 0, "step1": 0}, {"last0": 1}),
        Choice(2, {}, {"last0": 1, "last1": 1}),
    ]
    answer = query.solve(of, example, layers=[Choices("levels", [choices]), *SUMS["generator"]])
    assert answer.layers == {"levels": 1, "iterations": 4, "steps": 2, "start": 1}
    assert answer.registers == {"last0": 3, "last1": 0, "start": 1, "step0": 2, "step1": 0}


def test_time_that_is_over_is_unknown_and_not_infeasible():
    of = systems.generator()
    example = Example(16, {}, {"fire": [0] * 7 + [None] * 9})
    assert query.solve(of, example, limit_s=0.0).verdict == query.GAVE_UP


def test_words_that_are_fixed_stay():
    of = systems.pwm()
    example = Example(6, {}, {"high": [1, 0, 0, 1, 0, 0]})
    assert query.solve(of, example, fixed={"period": 2}).registers == {"period": 2, "duty": 1}
    assert query.solve(of, example, fixed={"period": 3}).verdict == query.INFEASIBLE


def test_components_are_given_what_those_before_found():
    one, other = systems.pwm(), systems.pwm()
    first = modular.Component("slow", one, Example(6, {}, {"high": [1, 0, 0, 1, 0, 0]}))
    told = []

    def follows(known):
        told.append(dict(known))
        return Example(4, {}, {"high": [1, 0, 0, 1]})

    answers = modular.solve([first, modular.Component("same", other, follows)])
    assert answers.verdict == query.SOLVED and told == [{"period": 2, "duty": 1}]
    # With a period of its own, where the shared one does not do.
    longer = modular.Component("longer", other, Example(5, {}, {"high": [1, 1, 0, 0, 1]}))
    answers = modular.solve([first, longer])
    assert answers.by_name["longer"].registers == {"period": 3, "duty": 2}
    never = modular.Component("never", other, Example(3, {}, {"high": [0, 0, 1]}))
    assert modular.solve([first, never]).verdict == query.INFEASIBLE


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example(2, {}, {"low": [0, 1]}), "unknown signal 'low'; known: high"),
        (Example(2, {"clock": [0, 1]}, {}), "unknown input 'clock'"),
        (Example(2, {}, {"high": [0]}), "high: expected 2 cycles, found 1"),
        (Example(1, {}, {"high": [2]}), "high, cycle 0: expected a word of 1 bits, found 2"),
    ],
)
def test_an_example_of_another_system_is_refused(example, message):
    with pytest.raises(ConfigError, match=message):
        query.solve(systems.pwm(), example)
