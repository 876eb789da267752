"""Live words and their layouts against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.push import words
from tilewright.pushmem import mapping, simulate, storage
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.errors import MappingError
from tilewright_study.experiments.push import apps

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
    addresses = sum(i * k for i, k in zip(indices, storage.pitches(shape, fetch), strict=True))
    made = storage.layout(addresses, write, last)
    assert apart(addresses, conflicts(write, last), made.size)
    at = [sum(a <= t <= b for a, b in zip(write, last, strict=True)) for t in range(40)]
    assert made.live == max(at) <= made.size


def test_the_line_of_brighten_blur_takes_66_words():
    plan = mapping.compile(apps.program("brighten_blur-64")).schedule
    far = max(plan.distance(e)[1] for e in plan.edges if e.buffer == "brighten")
    write = np.arange(1, 64 * 64)
    assert storage.layout(write, write, write + far) == storage.Layout(66, 66)


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize(("height", "width"), [(58, 58), (60, 61)])
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


def test_words_that_the_array_does_not_hold_are_counted(monkeypatch):
    monkeypatch.setattr(mapping, "MEMORY_TILES", 2)
    with pytest.raises(MappingError, match=r"in: 4800 words .* 3 tiles; the array has 2 tiles"):
        mapping.compile(sums_of_channels(40))
