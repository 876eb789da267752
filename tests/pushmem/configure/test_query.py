"""The question: pins are asked for, examples fit their system, and the interpreter has the last word."""

import subprocess
import sys
import time

import pytest

from helpers import extras
from helpers.systems import Builder, checked
from tilewright.core.errors import ConfigError, SolverError, SolverUnavailableError
from tilewright.pushmem.configure import explain, query, replay, unroll
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.solve import Solver

extras.need("bitwuzla")


def counter():
    """Counts `step` a cycle from `start`."""
    b = Builder("counter")
    start, step, go = b.parameter("start", 8), b.parameter("step", 8), b.input("go", 1)
    moved = b.state("moved", 8)
    b.next(moved, go.choose(moved + step, moved))
    b.output("value", moved + start)
    b.output("big", ~(moved + start).below(100))
    return b.system


GO = {"go": [1] * 4}


def test_a_pin_is_asked_for_and_taken_for_granted():
    example = Example(4, GO, {"value": [7, None, None, None]}, {"moved": [0, 5, 10, 15]})
    unrolled = unroll.Unrolled(counter(), example, Solver())
    # The state is a number in each cycle: what is asked of cycle 2 is 5 + step = 10, not 2 * step = 10.
    assert [each[:2] for each in unrolled.asked] == [("value", 0), ("moved", 1), ("moved", 2), ("moved", 3)]
    assert query.solve(counter(), example).registers == {"start": 7, "step": 5}


@pytest.mark.parametrize("cycle", [0, 1, 3])
def test_a_wrong_pin_has_no_answer(cycle):
    moved = [0, 5, 10, 15]
    moved[cycle] += 1
    answer = query.solve(counter(), Example(4, GO, {}, {"moved": moved}))
    assert answer.verdict == query.INFEASIBLE
    assert 1 <= len(answer.cause.asked) <= 2 and answer.cause.least
    assert checked(counter(), Example(4, GO, {}, {"moved": moved}), answer.cause)


def test_pins_and_outputs_of_one_signal_are_both_asked_for():
    example = Example(2, {"go": [0, 0]}, {"value": [3, None]}, {"value": [None, 4]})
    assert query.solve(counter(), example).verdict == query.INFEASIBLE


def test_words_that_decide_nothing_are_zero():
    answer = query.solve(counter(), Example(4, GO, {}, {"moved": [None, 9, None, None]}))
    assert answer.registers == {"start": 0, "step": 9}


def test_inputs_that_are_not_named_are_zero():
    answer = query.solve(counter(), Example(2, {}, {"value": [3, 3]}))
    assert answer.registers["start"] == 3


def test_a_cause_is_told_in_words():
    answer = query.solve(counter(), Example(4, GO, {"value": [1, None, None, None], "big": [1, 0, 1, 0]}))
    assert answer.cause.text() == "no configuration gives all of: value is 1 in cycle 0; big is 1 in cycle 0"
    many = explain.Cause([("value", cycle, 1) for cycle in range(10)], True)
    assert many.text().endswith("value is 1 in cycle 3; and 6 more")


def test_a_cause_that_is_not_least_is_refused_by_its_check():
    example = Example(4, GO, {"value": [1, 2, 3, 9]})
    cause = query.solve(counter(), example).cause
    more = explain.Cause([("value", cycle, word) for cycle, word in enumerate([1, 2, 3, 9])], True)
    assert checked(counter(), example, cause) and not checked(counter(), example, more)
    assert not checked(counter(), example, explain.Cause(cause.asked[:-1], True))


def test_a_feasible_example_has_no_cause():
    assert explain.cause(counter(), Example(2, {"go": [1, 1]}, {"value": [1, 2]})) is None


def test_an_answer_that_the_interpreter_refutes_is_no_answer(monkeypatch):
    monkeypatch.setattr(Solver, "found", lambda solver, term: 1)
    with pytest.raises(SolverError, match=r"counter: the interpreter refutes.*value, cycle 0: expected 7, found 1"):
        query.solve(counter(), Example(1, {"go": [1]}, {"value": [7]}))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example(1, {"gone": [1]}), "unknown input 'gone'; known: go"),
        (Example(1, {"go": [2]}), "go, cycle 0: expected a word of 1 bits, found 2"),
        (Example(1, {"go": [None]}), "go, cycle 0: expected a word of an input, found none"),
        (Example(2, {"go": [1]}), "go: expected 2 cycles, found 1"),
        (Example(1, {}, {"total": [1]}), "unknown signal 'total'; known: value, big, go, start, step, moved"),
        (Example(1, {}, {"value": [-1]}), "value, cycle 0: expected a word of 8 bits, found -1"),
        (Example(1, {}, {}, {"moved": [256]}), "moved, cycle 0: expected a word of 8 bits, found 256"),
    ],
)
def test_an_example_of_another_system_is_refused(example, message):
    with pytest.raises(ConfigError, match=message):
        query.solve(counter(), example)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"start": 1}, "counter: expected a value of step, found none"),
        ({"start": 1, "step": 256}, "step: expected a word of 8 bits, found 256"),
        ({"start": 1, "step": 1, "stop": 1}, "unknown configuration word 'stop'; known: start, step"),
    ],
)
def test_the_interpreter_refuses_another_configuration(words, message):
    with pytest.raises(ConfigError, match=message):
        replay.run(counter(), words, {}, 1, ["value"])


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitwuzla", None)
    with pytest.raises(SolverUnavailableError, match=r'needs bitwuzla: pip install "\.\[push\]"'):
        query.solve(counter(), Example(1, {}, {"value": [0]}))


def test_the_solver_is_loaded_only_where_it_is_asked():
    code = "import sys; from tilewright.pushmem.configure import design, query; print('bitwuzla' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_limit_holds_where_the_solver_does_not_look_at_its_clock(monkeypatch):
    monkeypatch.setattr(Solver, "check", lambda *assumed: time.sleep(60))
    begin = time.perf_counter()
    answer = query.solve(counter(), Example(4, GO, {"value": [1, None, None, None]}), limit_s=0.2)
    assert answer.verdict == query.GAVE_UP and time.perf_counter() - begin < 20


def test_a_limit_holds_while_terms_are_made(monkeypatch):
    right = Solver.in_time
    monkeypatch.setattr(Solver, "in_time", lambda solver: (time.sleep(0.05), right(solver)))
    answer = query.solve(counter(), Example(400, {"go": [1] * 400}, {"value": [None] * 400}), limit_s=0.2)
    assert answer.verdict == query.GAVE_UP


def test_an_error_passes_a_limit():
    with pytest.raises(ConfigError, match="unknown signal 'valu'"):
        query.solve(counter(), Example(1, {}, {"valu": [1]}), limit_s=20)
