import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import systems
from tilewright.configure import btor2, design, replay, words
from tilewright.configure.example import Example
from tilewright.configure.system import Node
from tilewright.core.errors import ArtifactError, ConfigError

PULSE = """
; a pulse
1 sort bitvec 4
2 sort bitvec 1
3 input 1 config_period
4 input 1 config_duty
5 zero 1
6 state 1 count
7 init 1 6 5
8 one 1
9 add 1 6 8
10 eq 2 6 3
11 ite 1 10 5 9
12 next 1 6 11
13 ult 2 6 4
14 output 13 high
"""


def test_a_design_does_what_its_system_does():
    read, made = btor2.read(PULSE, "config_.*"), systems.pwm()
    assert list(read.configuration) == ["config_period", "config_duty"] and list(read.states) == ["count"]
    for period, duty in ((3, 2), (15, 0), (0, 1)):
        one = replay.run(read, {"config_period": period, "config_duty": duty}, {}, 20, ["high"])
        assert one == replay.run(made, {"period": period, "duty": duty}, {}, 20, ["high"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("15 uext 1 -1 3", "line 18: unknown node -1"),
        ("15 uext 1 6 -1", "line 18: uext by -1 bits; expected at least 0"),
        ("15 add 1 6 99", "line 18: unknown node 99"),
        ("15 foo 1 6 8", "line 18: unknown operator foo"),
        ("15 add 77 6 8", "line 18: unknown sort 77"),
        ("15 add 2 6 8", "line 18: add gives 4 bits, its sort has 1"),
        ("15 slice 2 6 4 4", "line 18: slice of bits 4 to 4 of 4"),
        ("15 justice 1 13", "line 18: justice is no part"),
        ("15 fair 13", "line 18: fair is no part"),
        ("15 next 1 9 8", "line 18: next expects a state, found node 9"),
        ("15 add 1 6", "line 18: add expects 2 nodes, found 1"),
        ("what is this", "line 18: expected a node of BTOR2, found 'what is this'"),
    ],
)
def test_a_bad_line_is_named(line, message):
    with pytest.raises(ArtifactError, match=message):
        btor2.read(PULSE.rstrip("\n") + f"\n\n{line}\n", "config_.*")


def test_a_configuration_that_matches_nothing_is_refused():
    with pytest.raises(
        ConfigError, match=r"expected inputs that match 'register_\.\*', found none; inputs: config_period"
    ):
        btor2.read(PULSE, r"register_.*")


def test_memories_and_negated_nodes():
    text = """1 sort bitvec 2
2 sort bitvec 8
3 sort array 1 2
4 sort bitvec 1
5 input 2 config_seed
6 input 1 address
7 input 2 data
8 input 4 enable
9 state 3 memory
10 constd 2 7
11 init 3 9 10
12 write 3 9 6 7
13 ite 3 -8 9 12
14 next 3 9 13
15 read 2 9 6
16 xor 2 15 5
17 output 16 out
"""
    system = btor2.read(text, "config_seed")
    inputs = {"address": [1, 1, 1, 2, 2], "data": [9, 5, 5, 5, 5], "enable": [1, 0, 0, 0, 1]}
    assert replay.run(system, {"config_seed": 0}, inputs, 5, ["out"]) == {"out": [7, 9, 9, 7, 7]}
    assert replay.run(system, {"config_seed": 8}, inputs, 5, ["out"]) == {"out": [15, 1, 1, 15, 15]}


@given(st.sampled_from(sorted(words.OPERATORS)), st.integers(1, 9), st.data())
def test_the_solver_folds_to_what_the_interpreter_computes(op, width, data):
    bitwuzla = pytest.importorskip("bitwuzla")
    from tilewright.configure.solve import SAT, Solver

    value = st.integers(0, (1 << width) - 1)
    count = 1 if op in (*words.UNARY, "uext", "sext", "slice") else 3 if op == "ite" else 2
    args = [data.draw(value) for _ in range(count)]
    numbers, out = (), width
    if op == "ite":
        args[0] &= 1
    if op in words.COMPARED or op.startswith("red"):
        numbers, out = (width,), 1
        if op in ("implies", "iff"):
            args, numbers = [arg & 1 for arg in args], (1,)
    elif op in ("uext", "sext"):
        numbers, out = (width,), width + 3
    elif op == "slice":
        low = data.draw(st.integers(0, width - 1))
        high = data.draw(st.integers(low, width - 1))
        numbers, out = (high, low), high - low + 1
    elif op == "concat":
        numbers, out = (width,), 2 * width
    node = Node(op, out, tuple(range(count)), numbers)
    wanted = words.OPERATORS[op](node, *args)
    solver = Solver()
    bits = [1 if op in ("implies", "iff") or (op == "ite" and at == 0) else width for at in range(count)]
    terms = [solver.unknown(f"x{at}", each) for at, each in enumerate(bits)]
    for term, arg in zip(terms, args, strict=True):
        solver.require(solver.equal(term, arg))
    result = solver.apply(node, terms)
    assert solver.check() == SAT and solver.found(result) == wanted
    assert bitwuzla


def write(path, columns):
    names = list(columns)
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([names, *zip(*columns.values(), strict=True)])


def test_a_design_is_configured_and_verified(tmp_path):
    pytest.importorskip("bitwuzla")
    (tmp_path / "pulse.btor2").write_text(PULSE)
    write(tmp_path / "trace.csv", {"high": [1, 1, 0, 0, "x", 1, "", 0]})
    arguments = tmp_path / "pulse.btor2", "config_.*", tmp_path / "trace.csv", tmp_path / "answer.json"
    answer = design.run(*arguments)
    assert answer.registers == {"config_period": 3, "config_duty": 2} and answer.replayed == 8
    assert design.verify(*arguments) == 8
    write(tmp_path / "trace.csv", {"high": [1, 1, 0, 0, "x", 1, "", 1]})
    with pytest.raises(ConfigError, match=r"answer\.json: high, cycle 7: expected 1, found 0"):
        design.verify(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected columns|expected a row"),
        ("high\n", "expected a row for each cycle, found none"),
        ("low\n1\n", "expected columns among config|expected columns among"),
        ("high\n1,2\n", "row 2: expected 1 columns, found 2"),
        ("high\n1\n3\n", "row 3, column high: expected a word of 1 bits or x, found 3"),
        ("high\nyes\n", "row 2, column high: expected a word of 1 bits or x, found yes"),
    ],
)
def test_a_bad_example_is_named(text, message, tmp_path):
    (tmp_path / "pulse.btor2").write_text(PULSE)
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ArtifactError, match=message):
        design.run(tmp_path / "pulse.btor2", "config_.*", tmp_path / "trace.csv", tmp_path / "answer.json")
    assert not (tmp_path / "answer.json").exists()


def test_an_example_tells_a_run_that_differs():
    example = Example(2, {}, {"high": [1, None]})
    assert example.broken({"high": [1, 0]}) is None
    assert example.broken({"high": [0, 0]}) == "high, cycle 0: expected 1, found 0"
