"""BTOR2: what is read runs as the design does; what cannot be read is named by its line."""

import numpy as np
import pytest

from helpers import extras
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure import btor2, query, replay
from tilewright.pushmem.configure.example import Example

HEAD = "1 sort bitvec 8\n2 sort bitvec 1\n3 input 1 a\n4 input 2 c\n5 sort array 1 1\n6 state 5 mem\n7 state 1 s\n"
# Counts `by` a cycle, never beyond `most`; what it adds has a name, and `free` has neither a first nor a next value.
BOUNDED = """
1 sort bitvec 4
2 sort bitvec 1
3 input 1 by
4 input 1 most
5 state 1 count
6 zero 1
7 init 1 5 6
8 state 1 free
9 add 1 5 3
10 add 1 9 8 sum
11 next 1 5 10
12 ulte 2 5 4
13 constraint 12
14 ugt 2 5 4 over
15 bad 14
16 output 5 seen
"""
ROM = """
1 sort bitvec 2
2 sort bitvec 8
3 sort array 1 2
4 input 1 place  ; where to read
5 state 3
6 const 1 01
7 constd 2 77
8 write 3 5 6 7
9 consth 2 a5
10 constd 1 -1
11 write 3 8 10 9
12 state 3 rom
13 init 3 12 11
17 next 3 12 12
14 read 2 12 4
15 output 14 word
16 output -14 other
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # Yosys 0.70 writes so where a comparison has a constant without bits.
        ("8 uext 1 -1 3", "line 8: unknown node -1"),
        ("8 not 1 99", "line 8: unknown node 99"),
        ("8 not 99 3", "line 8: unknown sort 99"),
        ("8 justice 1 4", "line 8: expected a design without justice"),
        ("8 fair 4", "line 8: expected a design without fair"),
        ("8 constraint 3", "line 8: constraint of 8 bits; expected 1 bit"),
        ("8 bad 6", "line 8: bad of an array of 8 bits by 8; expected a word"),
        ("8 output 6 o", "line 8: output of an array of 8 bits by 8; expected a word"),
        ("8 input 5 table", "line 8: the input table is an array; expected a word"),
        ("8 input 5 a", "line 8: the input a is an array; expected a word"),
        ("8 zero 5", "line 8: zero of an array; expected a word"),
        ("8 not 2 -6", "line 8: not does not take an array"),
        ("8 sort array 1 5", "line 8: expected an array of words by words, found one of arrays"),
        ("8 sort array 5 1", "line 8: expected an array of words by words, found one of arrays"),
        (
            "8 sort array 2 1\n9 write 8 6 3 3",
            "line 9: write gives an array of 8 bits by 8, its sort has an array of 8 bits by 1",
        ),
        ("8 sort array 1 1\n9 ite 1 4 6 6", "line 9: ite gives an array of 8 bits by 8, its sort has 8 bits"),
        ("8 sort array 2 2\n9 state 8 m\n10 init 8 9 6", "line 10: init of an array of 1 bits by 1 with an array of 8"),
        ("8 sort bitvec 0", "line 8: expected a sort of at least 1 bit, at most 65536, found 0"),
        ("8 sort bitvec 99999999999", "line 8: expected a sort of at least 1 bit, at most 65536, found 99999999999"),
        ("-8 add 1 3 3", "line 8: expected a number of at least 1, found -8"),
        ("8 const 2 0b1", "line 8: expected digits of const, found 0b1"),
        ("8 constd 1 1_0", "line 8: expected digits of constd, found 1_0"),
        ("8 constd 2 2", "line 8: expected a constant of 1 bits, found 2"),
        ("8 constd 1 256", "line 8: expected a constant of 8 bits, found 256"),
        ("8 constd 1 -129", "line 8: expected a constant of 8 bits, found -129"),
        ("8 consth 1 100", "line 8: expected a constant of 8 bits, found 100"),
        ("8 const 1 111", "line 8: expected a constant of 8 bits, found 111"),
        ("7 add 1 3 3", "line 8: the number 7 is used twice"),
        ("1 add 1 3 3", "line 8: the number 1 is used twice"),
        ("8 next 1 7 3\n9 next 1 7 3", "line 9: a second next of state s"),
        ("8 init 1 7 3\n9 init 1 7 3", "line 9: a second init of state s"),
        ("8 init 1 7 3", "line 7: state s has an initial value and no next; expected a next"),
        ("8 rolo 1 3 3", "line 8: unknown operator rolo"),
        ("8 add 1 3", "line 8: add expects 2 nodes, found 1"),
        ("8 add 1 3 4", "line 8: add does not take 8 bits, 1 bits"),
        ("8 add 2 3 3", "line 8: add gives 8 bits, its sort has 1"),
        ("8 eq 2 3 4", "line 8: eq does not take"),
        ("8 eq 2 6 3", "line 8: eq does not take an array"),
        ("8 ult 2 6 6", "line 8: ult does not take an array"),
        ("8 eq 1 6 6", "line 8: eq gives 1 bits, its sort has 8"),
        (
            "8 sort bitvec 16\n9 sort array 8 1\n10 state 9 m\n11 eq 2 10 10",
            "line 11: eq of an array of 8 bits by 16",
        ),
        ("8 iff 2 3 3", "line 8: iff does not take"),
        ("8 ite 1 3 3 3", "line 8: ite does not take"),
        ("8 read 1 3 3", "line 8: read does not take"),
        ("8 write 5 6 4 3", "line 8: write does not take"),
        ("8 concat 1 6 3", "line 8: concat does not take an array"),
        ("8 slice 2 3 8 8", "line 8: slice of bits 8 to 8 of 8"),
        ("8 slice 1 3 8 8", "line 8: slice of bits 8 to 8 of 8"),
        ("8 uext 1 3 -1", "line 8: uext by -1 bits"),
        ("8 next 1 3 3", "line 8: next expects a state"),
        ("8 next 1 7 4", "line 8: next of 8 bits with 1 bits"),
        ("8 next 2 7 7", "line 8: next of 8 bits with 8 bits"),
        ("8 input 1 a", "line 8: the name a is used twice"),
        ("8 output 3 o\n9 output 3 o", "line 9: the name o is used twice"),
        ("8 state 1 s", "line 8: the name s is used twice"),
        ("8 state 1 s\n9 next 1 7 7\n10 next 1 8 8", "line 8: two states have the name s"),
        ("8 sort list 4", "line 8: expected a sort bitvec or array"),
        ("8 const 1 12", "line 8: expected digits of const, found 12"),
        ("8 add", "line 8: expected a node of BTOR2"),
        ("eight add 1 3 3", "line 8: expected a node of BTOR2"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(lines, message):
    btor2.read(HEAD, "a")
    with pytest.raises(ArtifactError, match="^small.btor2: " + message):
        btor2.read(HEAD + lines, "a", "small.btor2")


@pytest.mark.parametrize(("chosen", "message"), [("b.*", "inputs that match 'b.*'.*inputs: a, c"), ("(", "regular")])
def test_a_configuration_that_matches_nothing_is_refused(chosen, message):
    with pytest.raises(ConfigError, match=message):
        btor2.read(HEAD, chosen)


def test_names_match_whole():
    system = btor2.read(HEAD + "8 input 1 ab\n", "a")
    assert list(system.configuration) == ["a"] and list(system.inputs) == ["c", "ab", "s"]


def test_a_memory_begins_with_words_that_are_written_one_by_one():
    extras.need("bitwuzla")
    system = btor2.read(ROM, "place")
    found = [replay.run(system, {"place": place}, {}, 1, ["word", "other"]) for place in range(4)]
    assert [each["word"] for each in found] == [[0], [77], [0], [0xA5]]
    assert [each["other"] for each in found] == [[255], [178], [255], [0x5A]]
    answer = query.solve(system, Example(2, {}, {"other": [None, 0x5A]}))
    assert answer.registers == {"place": 3}
    assert query.solve(system, Example(1, {}, {"word": [78]})).verdict == query.INFEASIBLE


def test_arrays_are_compared_word_by_word():
    extras.need("bitwuzla")
    lines = "1 sort bitvec 2\n2 sort bitvec 1\n3 input 1 a\n5 sort array 1 1\n6 state 5 mem\n7 state 1 s\n"
    lines += "8 write 5 6 3 7\n9 eq 2 6 8\n10 neq 2 6 8\n11 next 5 6 8\n12 output 9 same\n13 output 10 other\n"
    system = btor2.read(lines, "a")
    # A word is written over itself, over a 0, and over itself again.
    given = {"s": [0, 3, 3]}
    found = replay.run(system, {"a": 2}, given, 3, ["same", "other"])
    assert found == {"same": [1, 0, 1], "other": [0, 1, 0]}
    answer = query.solve(system, Example(3, given, found))
    assert answer.verdict == query.SOLVED
    assert query.solve(system, Example(3, given, {"same": [1, 1, 1]})).verdict == query.INFEASIBLE
    # Where every index is told, what stands elsewhere is of no account.
    text = "1 sort bitvec 1\n2 sort array 1 1\n3 input 1 a\n4 state 2 m\n5 zero 1\n6 one 1\n7 state 2 n\n8 init 2 7 6\n"
    text += "9 next 2 7 7\n10 write 2 4 5 3\n11 write 2 10 6 3\n12 eq 1 11 7\n13 output 12 o\n"
    full = btor2.read(text, "a")
    assert [replay.run(full, {"a": bit}, {}, 1, ["o"])["o"] for bit in (0, 1)] == [[0], [1]]
    assert query.solve(full, Example(1, {}, {"o": [1]})).registers == {"a": 1}


@pytest.mark.parametrize(
    ("value", "message"), [("8 add 1 3 3", "of the input a"), ("8 add 1 7 7", "one that needs itself")]
)
def test_first_values_of_inputs_or_of_themselves_are_refused(value, message):
    system = btor2.read(f"{HEAD}{value}\n9 init 1 7 8\n10 next 1 7 7\n11 output 7 o\n", "c")
    with pytest.raises(ConfigError, match=message):
        replay.run(system, {"c": 0}, {}, 1, ["o"])


def test_a_tile_in_btor2_runs_as_its_library_does():
    extras.need("amaranth", "pyosys")
    from tilewright.core.errors import Unavailable
    from tilewright.pushmem import memories, rtl

    memory = memories.member("pub")
    try:
        tile = rtl.Tile(memory)
    except Unavailable as error:
        pytest.skip(str(error))
    constants = [name for name in tile.compiled.constants if name != "rst"]
    system = btor2.read(rtl.btor2(memory), "|".join(constants))
    rng, cycles, moved = np.random.default_rng(5), 200, 0
    for _ in range(30):
        # Small numbers, so that controllers fire, also at once.
        registers = {name: int(rng.integers(0, min(1 << system.width(name), 5))) for name in constants}
        often = [name for name in constants if name.endswith(("_enable", "_cycle_step0", "_cycle_step1"))]
        registers |= {name: 1 for name in often if rng.random() < 0.8}
        registers |= {name: int(rng.integers(4, 40)) for name in constants if name.endswith("_last0")}
        inputs = {name: rng.integers(0, 1 << system.width(name), cycles).tolist() for name in tile.compiled.inputs}
        inputs["run"] = (rng.random(cycles) < 0.95).astype(int).tolist()
        found = replay.run(system, registers, inputs, cycles, tile.compiled.outputs)
        given = np.array([inputs[name] for name in tile.compiled.inputs]).T
        ran = tile.compiled.run({**registers, "rst": 0}, given)
        assert [found[name] for name in tile.compiled.outputs] == ran.T.tolist()
        moved += sum(any(found[name]) for name in tile.compiled.outputs if name.startswith("data_out"))
    assert moved > 5


def test_constraints_hold_in_every_cycle_and_bad_states_are_told_or_of_no_account():
    extras.need("bitwuzla")
    system = btor2.read(BOUNDED, "by|most")
    # From 0, three cycles later it is 9: by three a cycle, and the most is at least 9.
    answer = query.solve(system, Example(4, {}, {"seen": [None, None, None, 9]}))
    assert answer.registers["by"] == 3 and answer.registers["most"] >= 9
    assert query.solve(system, Example(4, {}, {"bad15": [None, None, None, 1]})).verdict == query.INFEASIBLE
    refuted = query.solve(system, Example(4, {}, {"seen": [None, None, None, 9]}), fixed={"most": 8})
    assert refuted.verdict == query.INFEASIBLE and ("constraint13", 3, 1) in refuted.cause.asked


def test_states_without_a_next_are_inputs_and_inner_names_are_kept():
    extras.need("bitwuzla")
    system = btor2.read(BOUNDED, "by|most")
    assert "free" in system.inputs and "free" not in system.states
    assert {"sum", "over", "count", "seen"} <= set(system.told())
    found = replay.run(system, {"by": 1, "most": 9}, {"free": [0, 5, 0]}, 3, ["count", "sum"])
    assert found == {"count": [0, 1, 7], "sum": [1, 7, 8]}
    answer = query.solve(system, Example(3, {"free": [0, 5, 0]}, {"sum": [None, None, 8]}))
    assert answer.registers["by"] == 1
