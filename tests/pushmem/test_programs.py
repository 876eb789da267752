"""Random programs through the whole compiler, and programs that it refuses."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.push import stencil
from tilewright.core.errors import UnknownNameError
from tilewright.pushmem import apps, dsl, mapping, simulate
from tilewright.pushmem.affine import fit, generate
from tilewright.pushmem.dsl import Input, Lut, Stage, select
from tilewright.pushmem.errors import ProgramError

extras.need("islpy")


@st.composite
def programs(draw):
    """Random stencils, see `stencil`."""
    return stencil(lambda low, high: draw(st.integers(low, high)), lambda members: draw(st.sampled_from(members)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(["pub", "dp"]), st.integers(0, 1 << 30))
def test_random_programs_give_the_words_of_numpy_with_and_without_stalls(outputs, memory, seed):
    mapped = mapping.compile(outputs, memory)
    rng = np.random.default_rng(seed)
    (image,) = (s for s in dsl.stages_of(outputs) if not isinstance(s, Stage))
    data = {"in": rng.integers(0, 1 << 16, image.shape).astype(np.uint16)}
    for stalls in (None, rng.random(50) < 0.3):
        run = simulate.run(mapped, data, stalls)
        assert simulate.differing_words(mapped, outputs, data, run.outputs) == 0
    assert mapped.schedule.storage <= mapped.schedule.storage_asap


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 5), st.integers(-9, 9), st.integers(-9, 9)), max_size=4),
    st.integers(-5, 5),
)
def test_loops_found_from_events_give_the_same_events(loops, start):
    extents = [e for e, _, _ in loops]
    table = np.stack([generate(extents, [k[c] for k in loops], start) for c in (1, 2)], axis=1)
    found = fit(table)
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


IMAGE = Input("in", (8, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y * x, x]), r"affine; found \(i0\) \* \(i1\)"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[IMAGE[y, x], x]), "found the data in"),
        (
            lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y + 1, x]),
            r"s: index i0 \+ 1 of in spans 1..8, not within 0..7",
        ),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y, x, x]), "in has 2 dimensions; found 3 indices"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[y // 0, x]), "positive constants only"),
        (lambda: Stage("s", (8, 8), lambda y, x: 1 if IMAGE[y, x] else 0), "use select"),
        (lambda: Stage("s", (8, 8), lambda y, x: IMAGE[x, y]), "no raster does so"),
        (lambda: Stage("s", (8, 4), lambda y, x: IMAGE[y, x] + IMAGE[y, 2 * x]), "do not balance"),
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


def test_stages_that_read_each_other_are_refused():
    found = []
    one = Stage("one", (8, 8), lambda y, x: found[0][y, x])
    found.append(Stage("two", (8, 8), lambda y, x: one[y, x]))
    with pytest.raises(ProgramError, match="cycle: one -> two -> one"):
        mapping.compile([one])


def test_an_app_that_is_not_there_names_those_that_are():
    with pytest.raises(UnknownNameError, match="gaussian-<side>"):
        apps.program("sobel-64")
