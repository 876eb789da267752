"""Deliberate faults, one at a time, in what is found or in what runs it: verification catches each."""

import json

import numpy as np
import pytest

from helpers import extras
from helpers.systems import Builder
from tilewright.core.errors import ConfigError, SolverError
from tilewright.pushmem import configuration_file, fit, memories, recurrence, settings, solve, templates
from tilewright.pushmem.configure import design, query, words
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.solve import Solver
from tilewright.pushmem.memories import pub
from tilewright_study.experiments.push import examples
from tilewright_study.stages import configure

pytestmark = pytest.mark.mutation
PUB = memories.member("pub")
NAME = "line_buffer-2-8x8"
STREAM = examples.stream(NAME, PUB.PARAMETERS)
KNOWN = templates.configuration(STREAM, PUB)


def changed():
    """``(what, configuration)``: of every controller one number is one larger, or it is left out."""
    for name, controller in KNOWN.controllers.items():
        others = {key: value for key, value in KNOWN.controllers.items() if key != name}
        yield f"without {name}", settings.Configuration("pub", others)
        bits, affines = PUB.PARAMETERS.ports()[name].addresses, {"cycle": controller.cycle, **controller.addresses}
        for what, affine in affines.items():
            for place in range(1 + len(affine.strides)):
                numbers = [
                    (n + (at == place)) % (1 << bits.get(what, 16))
                    for at, n in enumerate((affine.start, *affine.strides))
                ]
                given = affines | {what: settings.Affine(numbers[0], tuple(numbers[1:]))}
                one = settings.Controller(controller.extents, given.pop("cycle"), given)
                yield f"{name}.{what}[{place}]", settings.Configuration("pub", {**others, name: one})
        for at in range(len(controller.extents)):
            extents = tuple(extent + (at == place) for place, extent in enumerate(controller.extents))
            one = settings.Controller(extents, controller.cycle, controller.addresses)
            yield f"{name}: loop {at} once more", settings.Configuration("pub", {**others, name: one})


def gives_the_stream(configuration):
    try:
        solve.verified(configuration, STREAM, PUB, hardware=False)
    except SolverError as error:
        assert "the model does not give the stream" in str(error)
        return False
    return True


def test_every_number_of_a_configuration_is_verified():
    assert gives_the_stream(KNOWN)
    passed = [what for what, other in changed() if gives_the_stream(other)]
    # A controller may go on behind the last word that is needed, and a fetch may have a cycle to spare.
    spared = (
        "in2agg0: loop 0 once more",
        "agg2sram0: loop 0 once more",
        "sram2tb0: loop 0 once more",
        "sram2tb0.cycle[0]",
    )
    assert set(passed) <= set(spared), passed


def test_what_the_model_lets_pass_the_rtl_does_too():
    extras.need("amaranth", "pyosys")
    for what, other in changed():
        if gives_the_stream(other):
            assert not solve.hardware_differences(other, STREAM, PUB), what


def test_the_command_refuses_a_configuration_with_a_fault(tmp_path):
    configuration_file.write(tmp_path / "c.json", KNOWN)
    document = json.loads((tmp_path / "c.json").read_text())
    document["controllers"]["sram2tb0"]["sram"]["start"] += 1
    (tmp_path / "c.json").write_text(json.dumps(document))
    asked = dict.fromkeys(
        ("component", "memory", "engine", "layers", "fix", "time_limit", "system", "solve", "least", "example")
    )
    asked |= {"write_stream": None, "output": None, "monolithic": False, "stream": NAME, "verify": tmp_path / "c.json"}
    with pytest.raises(SolverError, match="the model does not give the stream: "):
        configure.run(**asked)


def late(right):
    """What `right` gives, a cycle later."""
    return lambda *given, **named: tuple(np.roll(each, 1, 0) for each in right(*given, **named))


@pytest.mark.parametrize("part", ["aggregated", "stored", "buffered"])
def test_a_model_that_is_a_cycle_late_is_caught(part, monkeypatch):
    monkeypatch.setattr(pub, part, late(getattr(pub, part)))
    assert not gives_the_stream(KNOWN)


def test_rtl_with_another_configuration_is_caught(monkeypatch):
    extras.need("amaranth", "pyosys")
    right = recurrence.registers
    wrong = {"tb2out0_tb_start": 1}
    monkeypatch.setattr(recurrence, "registers", lambda *given: right(*given) | wrong)
    with pytest.raises(SolverError, match="the RTL does not give the stream: port 0, cycle"):
        solve.verified(KNOWN, STREAM, PUB)


def test_loops_that_are_fitted_wrong_are_not_returned(monkeypatch):
    right = fit.controller

    def wrong(*given, **named):
        found = right(*given, **named)
        return settings.Controller(
            found.extents, settings.Affine(found.cycle.start + 1, found.cycle.strides), found.addresses
        )

    monkeypatch.setattr(fit, "controller", wrong)
    assert solve.solve(STREAM, PUB, engine="fit", hardware=False).configuration is None


def counter():
    made = Builder("counter")
    step = made.parameter("by", 8)
    count = made.state("count", 8)
    made.next(count, count + step)
    made.output("seen", count)
    return made.system


ASKED = Example(4, {}, {"seen": [0, 3, 6, 9]})


def test_a_solvers_word_that_is_wrong_is_refuted_by_the_interpreter(monkeypatch):
    extras.need("bitwuzla")
    right = Solver.found
    monkeypatch.setattr(Solver, "found", lambda solver, term: right(solver, term) ^ 1)
    with pytest.raises(SolverError, match="the interpreter refutes the solver's answer: seen, cycle 1"):
        query.solve(counter(), ASKED)


def test_a_constant_that_is_folded_wrong_is_refuted(monkeypatch):
    extras.need("bitwuzla")
    monkeypatch.setitem(words.OPERATORS, "add", lambda node, one, other: (one + other + 1) & 255)
    # The interpreter has a line of its own for a sum.
    with pytest.raises(SolverError, match="the interpreter refutes"):
        answer = query.solve(counter(), Example(4, {}, {"seen": [0, 4, 8, 12]}), fixed={"by": 3})
        pytest.fail(f"{answer.verdict} and not refuted")


def test_a_written_register_that_is_changed_is_caught(tmp_path):
    extras.need("bitwuzla")
    text = "1 sort bitvec 8\n2 input 1 by\n3 state 1 s\n4 zero 1\n5 init 1 3 4\n6 add 1 3 2\n7 next 1 3 6\n"
    text += "8 output 3 seen\n"
    (tmp_path / "d.btor2").write_text(text)
    (tmp_path / "e.csv").write_text("seen\n0\n3\n6\n")
    files = tmp_path / "d.btor2", "by", tmp_path / "e.csv"
    design.run(*files, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    document["registers"]["by"] += 1
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="seen, cycle 1: expected 3, found 4"):
        design.verify(*files, tmp_path / "a.json")
