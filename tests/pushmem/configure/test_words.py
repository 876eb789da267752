"""Every operator: the interpreter's own, the lines it writes, and the solver's agree on all words of three bits."""

import itertools

import pytest

from helpers import extras
from tilewright.pushmem.configure import btor2, query, replay, smtlib, words
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.solve import SAT, UNSAT, Solver
from tilewright.pushmem.configure.system import Node

SORTS = "1 sort bitvec 1\n3 sort bitvec 3\n4 sort bitvec 4\n5 sort bitvec 5\n6 sort bitvec 6\n2 sort bitvec 2\n"
INPUTS = "10 input 3 a\n11 input 3 b\n12 slice 1 10 0 0\n13 slice 1 11 0 0\n"


def lines():
    """``(operator, its line in a file)``."""
    for op in words.UNARY:
        yield op, f"20 {op} {1 if op.startswith('red') else 3} 10"
    for op in (*words.SAME, *(each for each in words.COMPARED if each not in ("implies", "iff"))):
        yield op, f"20 {op} {3 if op in words.SAME else 1} 10 11"
    yield from ((op, f"20 {op} 1 12 13") for op in ("implies", "iff"))
    yield from (("uext", "20 uext 5 10 2"), ("sext", "20 sext 5 10 2"), ("uext", "20 uext 3 10 0"))
    yield from (("slice", "20 slice 2 10 2 1"), ("concat", "20 concat 6 10 11"), ("ite", "20 ite 3 12 10 11"))


def test_every_operator_is_among_the_lines():
    assert {op for op, _ in lines()} == set(words.OPERATORS)


@pytest.mark.parametrize(("op", "line"), [pytest.param(*each, id=each[1]) for each in lines()])
def test_an_operator_is_the_same_everywhere(op, line):
    extras.need("bitwuzla")
    system = btor2.read(f"{SORTS}{INPUTS}{line}\n30 output 20 out\n", "b")
    node, solver = system.nodes[system.outputs["out"]], Solver()
    assert node.op == op
    pairs = list(itertools.product(range(8), repeat=2))
    terms, alone = [], []
    for one, other in pairs:
        known = {0: one, 1: other, 2: one & 1, 3: other & 1}
        args = [known[arg] for arg in node.args]
        alone.append(words.OPERATORS[op](node, *args))
        given = [solver.value(arg, system.nodes[at].width) for arg, at in zip(args, node.args, strict=True)]
        terms.append(solver.apply(node, given))
    assert solver.check() == SAT
    assert [solver.found(term) for term in terms] == alone
    for other in range(8):
        column = replay.run(system, {"b": other}, {"a": list(range(8))}, 8, ["out"])["out"]
        assert column == [value for (_, second), value in zip(pairs, alone, strict=True) if second == other]


@pytest.mark.parametrize(("op", "line"), [pytest.param(*each, id=each[1]) for each in lines()])
@pytest.mark.parametrize("sought", ["a", "b"])
def test_an_operator_of_a_word_that_is_known_is_folded_right(op, line, sought):
    extras.need("bitwuzla")
    system = btor2.read(f"{SORTS}{INPUTS}{line}\n30 output 20 out\n", sought)
    inputs = {"b" if sought == "a" else "a": list(range(8))}
    for value in (0, 1, 3, 4, 7):
        column = replay.run(system, {sought: value}, inputs, 8, ["out"])["out"]
        assert query.solve(system, Example(8, inputs, {"out": column}), explained=False).verdict == query.SOLVED


def test_amounts_of_shifts_may_have_fewer_bits():
    extras.need("bitwuzla")
    solver = Solver()
    term = solver.apply(Node("sll", 4, (0, 1)), [solver.value(3, 4), solver.value(2, 2)])
    assert solver.check() == SAT and solver.found(term) == 12


def test_operators_are_written_as_the_interpreter_reads_them(tmp_path):
    extras.need("bitwuzla")
    text = smtlib.Text()
    for at, (op, line) in enumerate(lines()):
        system = btor2.read(f"{SORTS}{INPUTS}{line}\n30 output 20 out\n", "b")
        node = system.nodes[system.outputs["out"]]
        for one, other in itertools.product(range(8), repeat=2):
            known = [{0: one, 1: other, 2: one & 1, 3: other & 1}[arg] for arg in node.args]
            args = [text.value(arg, system.nodes[place].width) for arg, place in zip(known, node.args, strict=True)]
            wrong = text.negated(text.equal(text.apply(node, args), words.OPERATORS[op](node, *known)))
            text.lines.append(f"(define-fun |wrong {at} {one} {other}| () Bool {wrong.text})")
    broken = " ".join(line.split()[1] + " " + " ".join(line.split()[2:5]) for line in text.lines if "|wrong" in line)
    text.lines.append(f"(assert (or {broken}))")
    (tmp_path / "all.smt2").write_text(text.written())
    assert smtlib.confirmed(tmp_path / "all.smt2")[1] == UNSAT
