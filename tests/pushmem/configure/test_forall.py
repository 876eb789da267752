"""Statements for all inputs: verdicts are those of a search through all configurations and runs, and confirmed."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras, statements, systems
from helpers.systems import Builder
from tilewright.core.errors import ConfigError, SolverError
from tilewright.pushmem.configure import design, forall, smtlib
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.objectives import Least
from tilewright.pushmem.configure.solve import UNKNOWN, UNSAT
from tilewright_study.stages import configure

extras.need("bitwuzla")
CYCLES = 2
# Operators of two words of two bits, by themselves in numpy.
OPERATORS = {
    "add": lambda one, other: (one + other) % 4,
    "sub": lambda one, other: (one - other) % 4,
    "mul": lambda one, other: one * other % 4,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_verdicts_and_least_values_are_those_of_all_configurations_and_runs(data):
    """A state moves by an expression of itself, two configuration words and an input; it must never be some word."""
    b = Builder("drawn")
    leaves = {name: b.parameter(name, 2) for name in "pq"} | {"x": b.input("x", 2), "s": b.state("s", 2)}
    names = list(leaves)
    steps = [
        (data.draw(st.sampled_from([*OPERATORS])), *data.draw(st.tuples(*[st.integers(0, len(names) + at - 1)] * 2)))
        for at in range(3)
    ]
    bad, limit = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    made = list(leaves.values())
    for op, one, other in steps:
        made.append(b.apply(op, made[one], made[other]))
    b.next(leaves["s"], made[-1])
    b.output("bad", made[-2].equals(bad))
    b.output("allowed", leaves["x"].below(limit) | leaves["x"].equals(limit))
    b.system.bad.append("bad")
    b.system.constraints.append("allowed")

    right = []
    for p, q in itertools.product(range(4), repeat=2):
        x = np.array(list(itertools.product(range(limit + 1), repeat=CYCLES))).T
        state, broken = np.zeros(x.shape[1], int), np.zeros(x.shape[1], bool)
        for cycle in range(CYCLES):
            values = [np.full_like(state, p), np.full_like(state, q), x[cycle], state]
            for op, one, other in steps:
                values.append(OPERATORS[op](values[one], values[other]))
            broken |= values[-2] == bad
            state = values[-1]
        if not broken.any():
            right.append((p, q))
    answer = forall.solve(b.system, Example(CYCLES), "x", layers=[Least("least", [[("q", 0)]])])
    assert answer.verdict == ("solved" if right else "infeasible")
    if right:
        found = answer.registers["p"], answer.registers["q"]
        assert found in right and found[1] == answer.layers["least"] == min(q for _, q in right)
    else:
        assert len(answer.runs) <= answer.rounds


# `value` grows by `by_step` while `go`, from 0; `other` by 3, from any word, while `go`.
COUNTER = (
    systems.COUNTER
    + """14 state 2 other
15 constd 2 3
16 add 2 14 15
17 ite 2 3 16 14
18 next 2 14 17
19 constd 2 7
"""
)
FROM_0 = COUNTER + "20 init 2 14 7\n21 add 2 14 19\n22 neq 1 21 12\n23 bad 22 wrong\n"


def asked(tmp_path, text, cycles=4, **more):
    """The answer and its document; every written question is confirmed."""
    (tmp_path / "own.btor2").write_text(text)
    answer = design.run_for_all(tmp_path / "own.btor2", "by_.*", "go", tmp_path / "own.json", cycles=cycles, **more)
    document = json.loads((tmp_path / "own.json").read_text())
    assert sorted(document["proofs"]) == sorted(path.name for path in tmp_path.glob("own.*.smt2"))
    assert all(UNSAT in each.values() for each in document["proofs"].values())
    return answer, document


def test_a_configuration_is_right_for_all_cycles_by_induction(tmp_path):
    answer, document = asked(tmp_path, FROM_0, always=True)
    assert answer.registers == {"by_start": 7, "by_step": 3} and answer.depth == document["induction"] == 1
    assert sorted(document["proofs"]) == ["own.induction.smt2", "own.runs.smt2"]


def test_first_words_that_are_open_may_be_any(tmp_path):
    answer, document = asked(tmp_path, FROM_0.replace("20 init 2 14 7\n", ""))
    assert answer.verdict == "infeasible" and len(answer.runs) == 2
    assert (
        "no configuration is right for 2 runs together" in document["cause"] and "other at first" in document["cause"]
    )
    assert len({run.begin["other"] for run in answer.runs}) == 2


def test_what_no_induction_proves_is_unknown(tmp_path):
    # A count to 3 that never comes to 6: from 5 it would.
    text = COUNTER.split("14 state")[0] + "14 constd 2 6\n15 eq 1 6 14\n16 bad 15 wrong\n"
    text = text.replace("10 ite 2 3 9 6", "24 constd 2 3\n25 eq 1 6 24\n26 ite 2 25 7 9\n10 uext 2 26 0")
    answer, _ = asked(tmp_path, text + "27 one 2\n28 eq 1 5 27\n29 constraint 28\n", cycles=2, always=True)
    assert (answer.verdict, answer.registers["by_step"]) == ("unknown", 1)
    assert answer.why == "right for 2 cycles; no induction of so many cycles proves it for all"
    assert asked(tmp_path, text + "27 one 2\n28 eq 1 5 27\n29 constraint 28\n", cycles=8, always=True)[0].depth == 3


def test_a_configuration_that_no_run_may_have_is_none(tmp_path):
    # Without the constraint every step but 3 is wrong; with it a wrong one has no runs at all.
    held = "24 constd 2 9\n25 eq 1 5 24\n26 constraint 25\n"
    answer, _ = asked(tmp_path, FROM_0 + held)
    assert answer.verdict == "infeasible"
    answer, _ = asked(tmp_path, FROM_0 + held + "27 neq 1 5 24\n28 constraint 27\n")
    assert answer.why == "no configuration lets the constraints hold for 4 cycles" and not answer.runs


def test_an_example_fixes_other_inputs_and_outputs(tmp_path):
    (tmp_path / "own.btor2").write_text(COUNTER)
    (tmp_path / "e.csv").write_text("value\n5\nx\n")
    answer = design.run_for_all(
        tmp_path / "own.btor2", "by_.*", "go", tmp_path / "own.json", trace=tmp_path / "e.csv", least=["by_step"]
    )
    assert (answer.registers, answer.layers) == ({"by_start": 5, "by_step": 0}, {"by_step": 0})
    (tmp_path / "e.csv").write_text("go,value\n1,5\n0,x\n")
    with pytest.raises(ConfigError, match="an example without the inputs that may be any, found go"):
        design.run_for_all(tmp_path / "own.btor2", "by_.*", "go", tmp_path / "own.json", trace=tmp_path / "e.csv")


def test_the_command_asks_and_verifies(tmp_path, capsys):
    (tmp_path / "own.btor2").write_text(FROM_0)
    values = dict.fromkeys(("stream", "component", "memory", "engine", "layers", "monolithic", "write_stream", "fix"))
    values |= {"system": tmp_path / "own.btor2", "solve": "by_.*", "for_all": "go", "cycles": 3, "always": True}
    values |= {"example": None, "least": None, "time_limit": None}
    out = tmp_path / "own.json"
    configure.run(**values, output=out, verify=None)
    assert ": solved, for all cycles; 1 counterexample; runs: unsat by " in capsys.readouterr().out
    configure.run(**values, output=None, verify=out)
    document = json.loads(out.read_text())
    out.write_text(json.dumps({**document, "registers": {"by_start": 7, "by_step": 4}}))
    with pytest.raises(ConfigError, match=r"own\.json: no configuration is right for a run: go is 1"):
        configure.run(**values, output=None, verify=out)
    with pytest.raises(SystemExit) as ended:
        configure.run(**{**values, "time_limit": 0.0}, output=out, verify=None)
    assert ended.value.code == 3 and "unknown: the time is over" in capsys.readouterr().out
    for other, message in (
        ({"for_all": None}, "--cycles, --always: apply to statements for all inputs; add --for-all"),
        ({"cycles": None}, "--for-all: expected --solve and one of --cycles and --example, found --solve"),
        ({"for_all": "stop"}, "expected inputs that match 'stop', found none; inputs: go"),
        ({"for_all": "("}, r"expected a regular expression, found '\('"),
    ):
        with pytest.raises(ConfigError, match=message):
            configure.run(**{**values, **other}, output=out, verify=None)
    (tmp_path / "own.btor2").write_text(COUNTER)
    for always, message in ((True, "expected an assertion"), (False, r"expected an assertion \(bad\) or an output")):
        with pytest.raises(ConfigError, match=message):
            configure.run(**{**values, "always": always}, output=out, verify=None)
    (tmp_path / "own.btor2").write_text(
        "1 sort bitvec 1\n2 sort array 1 1\n3 input 1 go\n4 input 1 by\n5 state 2 kept\n6 write 2 5 3 4\n7 next 2 5 6\n"
        "8 read 1 5 3\n9 bad 8\n"
    )
    with pytest.raises(ConfigError, match="expected first words of the memory kept, found none"):
        configure.run(**{**values, "solve": "by"}, output=out, verify=None)


def test_another_answer_of_the_other_solver_is_an_error(tmp_path):
    (tmp_path / "sat.smt2").write_text("(set-logic QF_ABV)\n(declare-const a Bool)\n(assert a)\n(check-sat)\n")
    with pytest.raises(SolverError, match=r"sat\.smt2: expected unsat of (z3|bitwuzla), found sat"):
        smtlib.confirmed(tmp_path / "sat.smt2")
    assert smtlib.confirmed(tmp_path / "sat.smt2", 0.0)[1] == UNKNOWN


SHORT = ("start + 5 x + 40 y", "start + x * x", "a product, two cycles late", "d less a product, 8 bits", "a + b")


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(each, id=each.name, marks=[] if each.name in SHORT else pytest.mark.slow)
        for each in statements.STATEMENTS
    ],
)
def test_multiply_add_blocks_and_addresses(statement, tmp_path):
    extras.need("pyosys")
    answer, _ = statements.asked(statement, Path(tmp_path), 60.0)
    assert answer.verdict == {True: "solved", False: "infeasible", None: "unknown"}[statement.exists], answer.why
    assert (answer.depth is not None) == (statement.always and statement.exists is True)
    assert all(said.startswith(UNSAT) for said in answer.confirmed.values())


def test_the_table_is_printed(monkeypatch, capsys):
    extras.need("pyosys")
    monkeypatch.setattr(statements, "STATEMENTS", statements.STATEMENTS[3:4])
    statements.main(20)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| generator | start + x * x | infeasible | 6 cycles |")
