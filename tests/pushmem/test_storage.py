"""Live words and their layouts against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.push import words
from tilewright.pushmem import apps, mapping, simulate, storage
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.errors import MappingError

SHAPES = [(7,), (3, 5), (2, 3, 4), (4, 4), (1, 6)]


@st.composite
def lives(draw):
    """``(shape, indices, write, last)``: some words of a box, written and last read at any times."""
    shape = draw(st.sampled_from(SHAPES))
    words = int(np.prod(shape))
    kept = sorted(draw(st.sets(st.integers(0, words - 1), min_size=1)))
    write = np.array([draw(st.integers(0, 25)) for _ in kept])
    last = write + np.array([draw(st.integers(0, 12)) for _ in kept])
    return shape, list(np.array(np.unravel_index(kept, shape))), write, last


def conflicts(write, last):
    """Pairs of words that live in one cycle, by looking at every pair and every cycle."""
    spans = [set(range(a, b + 1)) for a, b in zip(write, last, strict=True)]
    return [(v, w) for v, w in itertools.combinations(range(len(write)), 2) if spans[v] & spans[w]]


def apart(addresses, pairs, size):
    return all(addresses[v] % size != addresses[w] % size for v, w in pairs)


@settings(max_examples=300, deadline=None)
@given(lives())
def test_a_linear_modulus_is_one_more_than_the_largest_difference(case):
    shape, indices, write, last = case
    addresses = sum(i * k for i, k in zip(indices, storage.pitches(shape, 1), strict=True))
    pairs = conflicts(write, last)
    expected = 1 + max((abs(int(addresses[v] - addresses[w])) for v, w in pairs), default=0)
    found = storage.modulus(addresses, write, last)
    assert found == expected
    assert apart(addresses, pairs, found)


@settings(max_examples=300, deadline=None)
@given(lives(), st.sampled_from([1, 4]))
def test_a_layout_keeps_conflicting_words_apart_in_the_words_that_it_says(case, fetch):
    shape, indices, write, last = case
    made, pairs = storage.layout(shape, indices, write, last, fetch), conflicts(write, last)
    assert apart(made.addresses(indices), pairs, made.size)
    at = [sum(a <= t <= b for a, b in zip(write, last, strict=True)) for t in range(40)]
    assert made.live == max(at) <= made.size
    if fetch == 1:
        # No smaller modulus of the linear address can beat the one that is taken by its own rule.
        linear = storage.modulus(sum(i * k for i, k in zip(indices, made.pitch, strict=True)), write, last)
        successive = 1
        for d in range(len(shape)):
            same = [(v, w) for v, w in pairs if all(indices[e][v] == indices[e][w] for e in range(d))]
            successive *= 1 + max((abs(int(indices[d][v] - indices[d][w])) for v, w in same), default=0)
        assert made.size == min(linear, successive)


def test_words_whose_dimension_folds_take_less_than_the_linear_layout():
    # Two channels of 50 rows; one row of both is written, then the next, and each lives for two rows.
    indices = [i.ravel() for i in np.indices((2, 50, 8))]
    write = indices[1] * 16 + indices[0] * 8 + indices[2]
    made = storage.layout((2, 50, 8), indices, write, write + 31, 4)
    assert (made.kind, made.moduli, made.size) == ("dimensions", (2, 3, 8), 48)
    assert storage.modulus(made.addresses(indices), write, write + 31) <= 48


def test_the_line_of_brighten_blur_takes_66_words_by_isl_as_well():
    isl = pytest.importorskip("islpy")
    plan = mapping.compile(apps.program("brighten_blur-64")).schedule
    far = max(plan.distance(e)[1] for e in plan.edges if e.buffer == "brighten")
    grid = [i.ravel() for i in np.indices((64, 64))]
    read = (grid[0] > 0) | (grid[1] > 0)
    write = (64 * grid[0] + grid[1])[read]
    made = storage.layout((64, 64), [g[read] for g in grid], write, write + far)
    assert (made.size, made.live, made.kind) == (66, 66, "linear")
    alive = f"64a+b <= 64c+d+{far} and 64c+d <= 64a+b+{far}"
    box = " and ".join(f"0 <= {n} < 64" for n in "abcd")
    pairs = isl.Set(f"{{ [t] : exists a, b, c, d : {box} and {alive} and t = 64a+b-64c-d }}")
    assert int(str(pairs.dim_max(0).max_val())) + 1 == made.size


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize(("height", "width"), [(58, 58), (60, 61), (100, 112)])
def test_an_image_that_no_tile_holds_comes_at_the_pace_of_its_reduction(height, width, memory):
    image, weights = Input("in", (height, width)), Input("weights", (3, 3))

    def sums(y, x):
        return Reduce((3, 3), lambda ry, rx: image[y + ry, x + rx] * weights[ry, rx])

    outputs = [Stage("sums", (height - 2, width - 2), sums)]
    mapped, data = mapping.compile(outputs, memory), words(outputs)
    assert simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) == 0
    kept = mapped.wiring.layouts["in"]
    assert kept.live <= kept.size < 4 * width
    # As long as the multiply-adds and the rows before the first one take, and a row at the end.
    assert mapped.schedule.last_cycle < 9 * height * (width + 2)


def sums_of_channels(side):
    image = Input("in", (3, side, side))
    return [Stage("sums", (side, side), lambda y, x: Reduce((3,), lambda k: image[k, y, x]))]


def test_words_that_no_tile_holds_are_in_a_chain():
    assert len(mapping.compile(sums_of_channels(40)).tiles) == 3


def test_words_that_the_array_does_not_hold_are_counted():
    with pytest.raises(MappingError, match=r"in: 270000 words .* 132 tiles; the array has 128 tiles"):
        mapping.compile(sums_of_channels(300))
