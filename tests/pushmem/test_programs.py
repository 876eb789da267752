"""Random programs through the whole compiler, and programs that it refuses."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.push import stencil, words
from tilewright.core.errors import UnknownNameError
from tilewright.pushmem import dsl, mapping, netlist, simulate
from tilewright.pushmem.dsl import Input, Lut, Reduce, Stage, bounded, divide, select
from tilewright.pushmem.errors import MappingError, ProgramError
from tilewright.pushmem.fit import integers
from tilewright.pushmem.settings import generate
from tilewright_study.experiments.push import apps


@st.composite
def programs(draw):
    """Random stencils, see `stencil`."""
    return stencil(lambda low, high: draw(st.integers(low, high)), lambda members: draw(st.sampled_from(members)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(["pub", "dp"]), st.integers(0, 1 << 30))
def test_random_programs_give_the_words_of_numpy(outputs, memory, seed):
    mapped, data = mapping.compile(outputs, memory), words(outputs, seed)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 5), st.integers(-9, 9), st.integers(-9, 9)), max_size=4),
    st.integers(-5, 5),
)
def test_loops_found_from_events_give_the_same_events(loops, start):
    extents = [e for e, _, _ in loops]
    table = np.stack([generate(extents, [k[c] for k in loops], start) for c in (1, 2)], axis=1)
    found = integers(table)
    assert found is not None
    assert len(found[0]) <= len(extents)
    again = [generate(found[0], [s[c] for s in found[1]], table[0, c]) for c in range(2)]
    assert np.array_equal(np.stack(again, axis=1), table)


@pytest.mark.parametrize("pitch", [61, 62, 63, 64])
@pytest.mark.parametrize("distance", [16, 17, 61, 130])
def test_rows_of_any_pitch_and_distance_are_stored(pitch, distance):
    image = Input("in", (6, pitch))
    rows, columns = divmod(distance, pitch)
    late = Stage("late", (6 - rows, pitch - columns), lambda y, x: image[y + rows, x + columns] - image[y, x])
    mapped = mapping.compile([late])
    data = {"in": np.arange(6 * pitch).reshape(6, pitch).astype(np.uint16)}
    assert simulate.differing_words(mapped, [late], data, simulate.run(mapped, data).outputs) == 0


def test_a_line_longer_than_a_tile_goes_through_tiles_in_a_row():
    image = Input("in", (4, 3000))
    sums = Stage("sums", (3, 3000), lambda y, x: image[y, x] + image[y + 1, x])
    mapped = mapping.compile([sums])
    assert len(mapped.tiles) == 2
    data = {"in": np.arange(12000).reshape(4, 3000).astype(np.uint16)}
    assert simulate.differing_words(mapped, [sums], data, simulate.run(mapped, data).outputs) == 0


def test_a_table_is_read_at_all_its_indices():
    table = [(i * 7919) % 65536 for i in range(256)]
    image = Input("in", (16, 16))
    mapped = mapping.compile([Stage("looked", (16, 16), lambda y, x: Lut.of(table, image[y, x]))])
    data = {"in": np.arange(256).reshape(16, 16).astype(np.uint16)}
    assert simulate.run(mapped, data).outputs["looked"].ravel().tolist() == table


def test_signs_decide_shifts_and_comparisons():
    image = Input("in", (4, 4), "int16")
    out = Stage(
        "out", (4, 4), lambda y, x: select(image[y, x] < 0, abs(image[y, x]) >> 1, image[y, x].as_unsigned() >> 3)
    )
    data = {"in": np.arange(-8, 8).reshape(4, 4).astype(np.int16) * 4000}
    mapped = mapping.compile([out])
    expected = [(-v >> 1) if v < 0 else v >> 3 for v in data["in"].astype(int).ravel()]
    assert simulate.run(mapped, data).outputs["out"].ravel().tolist() == expected


@pytest.mark.parametrize("op", ["min", "max"])
def test_signs_decide_reductions_in_the_model_and_in_rtl(op):
    extras.need("amaranth", "pyosys")
    image = Input("in", (6, 8), "int16")
    least = [Stage("s", (4, 6), lambda y, x: Reduce((3, 3), lambda i, j: image[y + i, x + j], op=op), dtype="int16")]
    mapped, data = mapping.compile(least, "dp"), words(least)
    for found in (simulate.run(mapped, data).outputs, netlist.run(mapped, data)):
        assert simulate.differing_words(mapped, least, data, found) == 0


IMAGE, SPLIT = Input("in", (8, 8)), Input("p", (2, 4), unroll=(0,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y * x, x]),
            r"s: .* affine; found \(y\) \* \(x\) \(test_programs.py, line \d+: .*IMAGE\[y \* x, x\]",
        ),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[IMAGE[y, x], x]), "found the data in"),
        (
            lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y + 1, x]),
            r"s: index y \+ 1 of in spans 1..8, not within 0..7; bounded\(\) says what stands beyond",
        ),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x, x]), "in has 2 dimensions; found 3 indices"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y // 0, x]), "positive constants only"),
        (lambda: Stage("s", (8, 8), lambda y, x: 1 if IMAGE[y, x] else 0), "use select"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[max(y - 1, 0), x]), r"minimum\(\) or maximum\(\) for y - 1 < 0"),
        (
            lambda: Stage("s", (8, 8), lambda y, x: select(x == y, 1, 0)),
            r"found False; .* write \(a - b\) == 0 for a == b",
        ),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y / 2, x]), r"divided by //, .* found \(y\) / \(2\)"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[9 // (y + 1), x]), "divided by positive constants only"),
        *(
            (lambda f=f: Stage("s", (8, 8), lambda y, x: f(IMAGE[y, x])), message)
            for f, message in (
                (lambda a: a / 9, r"// rounds down, .* found in\[y, x\] / 9"),
                (lambda a: (a + 1) // 0, r"constants other than 0 only; found \(in\[y, x\] \+ 1\) // \(0\)"),
                (lambda a: a // a, r"constants other than 0 only; found \(in\[y, x\]\) // \(in\[y, x\]\)"),
                (lambda a: a % -9, r"positive constants; found \(in\[y, x\]\) % \(-9\); see as_signed"),
                (lambda a: a // 70000, "a divisor of 16 bits, found"),
                (lambda a: a.as_signed() // 40000, "a divisor of 16 bits, found"),
                (lambda a: 9 // a, r"by constants only; found 9 / in\[y, x\]"),
                (lambda a: a**2, r"takes no powers: .*; found \(in\[y, x\]\) \*\* 2"),
                (lambda a: 2**a, "takes no powers: << has those of two"),
                (lambda a: divide(a, 3, "up"), "unknown rounding 'up'; known: down, zero, nearest"),
            )
        ),
        (lambda: Stage("s", (8, 8), lambda y, x: bounded(IMAGE, "edge")[y, x]), "unknown border 'edge'; known: clamp,"),
        (lambda: Stage("s", (8, 8), lambda y, x: bounded(3, "clamp")[y, x]), "an input or a stage, found 3"),
        (
            lambda: Stage("s", (8, 8), lambda y, x: bounded(IMAGE, "clamp")[y - 40, x + 40]),
            r"s: clamp\(in\)\[y - 40, x \+ 40\] reads 64 places beyond the border, expected at most 32",
        ),
        (
            lambda: Stage("s", (8, 8), lambda y, x: select(x > 1, IMAGE[y, x - 2] + IMAGE[y, x + 1], 0)),
            r"s: index x \+ 1 of in spans 3..8, not within 0..7",
        ),
        (
            lambda: Stage("s", (8, 8), lambda y, x: Reduce((2,), lambda i: IMAGE[y, x], op="*")),
            r"reduction '\*'; known: \+",
        ),
        (
            lambda: Stage("s", (8, 8), lambda y, x: Reduce((2, 0), lambda i, j: IMAGE[y, x])),
            "a shape of positive integers",
        ),
        (lambda: Stage("s", (8, 8), lambda y, x: Reduce((2,), lambda i, j: IMAGE[y, x])), "a reduction: .* argument"),
        (
            lambda: Stage("s", (8, 8), lambda y, x: Reduce((2,), lambda i: IMAGE[y, x], unroll=(1,))),
            r"among \(0,\), found",
        ),
        (
            lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x], unroll=(5,)),
            r"s: .* unroll among \(0, 1\), found \(5,\)",
        ),
        (
            lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x], unroll=(0, 0)),
            "s: expected each dimension to unroll once",
        ),
        (lambda: Stage("s", 8, lambda y: IMAGE[y, y]), "s: expected a shape of positive integers, found 8"),
        (lambda: Stage("s", (8, 8), lambda y: IMAGE[y, y]), "s: .* takes 1 positional argument but 2 were given"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x], order=3), "s: unknown order 3; known: 'auto'"),
        (lambda: Stage("a b", (8, 8), lambda y, x: IMAGE[y, x]), "a name of letters, digits and _, found 'a b'"),
        (lambda: Stage("s", (4,), lambda x: SPLIT[0, x] + SPLIT[1, x] + Input("p_1", (4,))[x]), "are called 'p_1'"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x] + 70000), "expected a 16-bit constant"),
        (lambda: Stage("in", (8, 8), lambda y, x: IMAGE[y, x]), "two inputs or stages are called 'in'"),
        (lambda: Stage("s", (8, 0), lambda y, x: IMAGE[y, x]), "a shape of positive integers"),
        (lambda: Stage("s", (8, 8), lambda y, x: Lut.of([1, 2, 3], IMAGE[y, x])), "power of two, found 3"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x], dtype="int8"), "unknown type 'int8'"),
    ],
)
def test_a_program_that_cannot_be_compiled_says_why(make, message):
    with pytest.raises(ProgramError, match=message):
        mapping.compile([make()])


@pytest.mark.parametrize(
    "word",
    [
        lambda y, x: -IMAGE[y, x] + ~IMAGE[y, x],
        lambda y, x: (1 << IMAGE[y, x]) ^ (-8 >> IMAGE[y, x]),
        lambda y, x: (7 & IMAGE[y, x]) + (7 | IMAGE[y, x]) - (7 ^ IMAGE[y, x]),
        lambda y, x: x + IMAGE[y, x] * 2 - y * IMAGE[y, x],
        lambda y, x: select(x > 3, x >> 1, y & 3) + select(x != 3, 1 << x, x <= y),
        lambda y, x: (x - y == 0) + (IMAGE[y, x] == x) + (x == IMAGE[y, x]),
    ],
)
def test_operators_of_words_and_indices_in_any_order(word):
    whole, data = Stage("s", (8, 8), word), {"in": np.arange(64, dtype=np.uint16).reshape(8, 8) * 1031}
    mapped = mapping.compile(whole)
    assert simulate.differing_words(mapped, whole, data, simulate.run(mapped, data).outputs) == 0


def test_operators_of_words_are_those_of_integers():
    one, (y, x) = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1031, np.indices((8, 8))
    wide = one.astype(int)
    for word, wanted in (
        (lambda y, x: -IMAGE[y, x], -wide),
        (lambda y, x: ~IMAGE[y, x], ~wide),
        (lambda y, x: 1 << IMAGE[y, x], 1 << (wide & 15)),
        (lambda y, x: select(x > 3, 5, IMAGE[y, x]), np.where(x > 3, 5, wide)),
        (lambda y, x: x * IMAGE[y, x] - y, x * wide - y),
    ):
        found = dsl.evaluate(Stage("s", (8, 8), word), {"in": one})["s"]
        np.testing.assert_array_equal(found, (wanted & 65535).astype(np.uint16))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((), "expected at least one stage as output, found none"),
        (None, "expected stages as outputs, found None"),
        ([IMAGE], "expected stages as outputs, found 'in'"),
        ([Stage("s", (8, 8), lambda y, x: IMAGE[y, x])] * 2, "s: expected each output once, found it twice"),
    ],
)
def test_outputs_are_stages(outputs, message):
    with pytest.raises(ProgramError, match=message):
        mapping.compile(outputs)


def test_stages_that_read_each_other_are_refused():
    found = []
    one = Stage("one", (8, 8), lambda y, x: found[0][y, x])
    found.append(Stage("two", (8, 8), lambda y, x: one[y, x]))
    with pytest.raises(ProgramError, match="cycle: one -> two -> one"):
        mapping.compile([one])


def scattered(y, x):
    histogram = Stage("histogram", (256,), lambda i: i)
    histogram[IMAGE[y, x]] = 1


def test_a_write_whose_address_depends_on_data_is_refused_with_the_reason():
    with pytest.raises(ProgramError, match=r"histogram: .*stores at other addresses are not supported"):
        mapping.compile([Stage("s", (8, 8), scattered)])


def test_a_copy_that_no_stage_reads_is_named():
    image = Input("in", (3, 8, 8), unroll=(0,))
    with pytest.raises(ProgramError, match="in_2: no stage reads it, and it is no output"):
        mapping.compile([Stage("s", (8, 8), lambda y, x: image[0, y, x] + image[1, y, x])])


@pytest.mark.parametrize("given", [{}, {"in": np.zeros((8, 9))}, {"in": np.zeros(64)}])
def test_words_of_another_shape_are_refused(given):
    outputs = [Stage("s", (8, 8), lambda y, x: IMAGE[y, x])]
    with pytest.raises(ProgramError, match=r"input in: expected"):
        simulate.run(mapping.compile(outputs), given)
    with pytest.raises(ProgramError, match=r"input in: expected the shape \(8, 8\), found"):
        dsl.evaluate(outputs, given)


def test_seven_loops_after_flattening_are_counted():
    image = Input("in", (3, 5, 3, 3, 3, 3))

    def sums(a, b):
        return Reduce((2, 2, 2, 2, 3), lambda c, d, e, f, g: image[a + c, b + d, f, e, g, e])

    with pytest.raises(MappingError, match="in: 7 loops after flattening; a controller has 6"):
        mapping.compile([Stage("s", (2, 3), sums)])


def test_what_cannot_be_mapped_names_stream_output_cycle_and_a_memory_that_takes_it():
    image = Input("in", (9, 13))
    third = Stage("s", (4, 4), lambda y, x: Reduce((5,), lambda k: image[y + k, 3 * x]))
    expected = (
        r"in: .* on one pub tile: from cycle \d+ on, .* fetches for in.0 \(output 0\) meet .* would help; in.0 is "
        r"in\[i0 \+ r0, 3\*i1\] of s; the memory dp takes it, 1 tiles"
    )
    with pytest.raises(MappingError, match=expected):
        mapping.compile(third)
    assert len(mapping.compile(third, "dp").tiles) == 1
    with pytest.raises(
        MappingError, match=r"in.0, from cycle .* is not 6 loops; .* the memory pub does not take it either"
    ):
        mapping.compile(Stage("s", (9, 13), lambda y, x: image[y, (3 * x) // 4]), "dp")


def test_streams_that_no_tile_serves_together_get_a_tile_each():
    image = Input("in", (9, 13))
    word = lambda y, x: image[8 - y, x] + image[y, 12 - x] * 2 + image[8 - y, 12 - x] * 3  # noqa: E731
    for shape, outputs in (((9, 13), word), ((18, 26), lambda y, x: word(y // 2, x // 2))):
        stage = Stage("s", shape, outputs)
        mapped, data = mapping.compile(stage), words(stage)
        assert len(mapped.tiles) > 1
        assert simulate.differing_words(mapped, stage, data, simulate.run(mapped, data).outputs) == 0


def test_more_pes_or_tiles_than_the_array_has_are_counted():
    image = Input("in", (8, 8))
    wide = Stage("wide", (20, 20, 8, 8), lambda a, b, y, x: image[y, x] ^ (a * 20 + b), unroll=(0, 1))
    with pytest.raises(MappingError, match="needs 0 memory tiles and 400 PEs; the array has 128 and 384"):
        mapping.compile([wide])
    image = Input("in", (130, 3, 40), unroll=(0,))
    lines = Stage("lines", (130, 2, 40), lambda c, y, x: image[c, y, x] + image[c, y + 1, x], unroll=(0,))
    with pytest.raises(MappingError, match=r"needs [0-9]+ memory tiles and 130 PEs"):
        mapping.compile([lines], memory="dp")


def test_a_start_that_a_counter_cannot_tell_is_refused():
    image = Input("in", (300, 300))
    # The least value of a whole image is known after 90,000 cycles.
    least = Stage("least", (1, 1), lambda y, x: Reduce((300, 300), lambda ry, rx: image[y + ry, x + rx], op="min"))
    late = Stage("late", (1, 1), lambda y, x: least[y, x] + 1)
    with pytest.raises(MappingError, match=r"late: starts at cycle [0-9]+ and waits up to .* a counter reaches 65536"):
        mapping.compile([late])


def test_an_app_that_is_not_there_names_those_that_are():
    with pytest.raises(UnknownNameError, match="gaussian-<side>"):
        apps.program("sobel-64")


@pytest.mark.parametrize("memory", ["sram", "PUB", ""])
def test_a_memory_that_is_not_there_names_those_that_are(memory):
    with pytest.raises(UnknownNameError, match="known: pub, dp"):
        mapping.compile([Stage("s", (8, 8), lambda y, x: IMAGE[y, x])], memory)
