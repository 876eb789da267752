"""Reductions that share an outer loop: each stage works on another iteration; what is between them is held twice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from helpers import extras
from helpers.cases import rest_slow
from helpers.push import fails, without_parts, words
from tilewright.pushmem import mapping, netlist, rates, simulate
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright.pushmem.lowering import lower
from tilewright_study.experiments.push import apps


def products(windows, tokens, channels, mark=""):
    """Two products of matrices for each of `windows`: of channels, then of tokens, which needs all of the first."""
    image, weights = Input(f"{mark}in", (windows, tokens, channels)), Input(f"{mark}w", (channels,))
    mixing = Input(f"{mark}m", (tokens, tokens))
    first = Stage(
        f"{mark}first", (windows, tokens), lambda b, t: Reduce((channels,), lambda k: image[b, t, k] * weights[k])
    )
    second = Stage(
        f"{mark}second", (windows, tokens), lambda b, t: Reduce((tokens,), lambda k: first[b, k] * mixing[t, k])
    )
    return (second,)


def filters(windows, side, first, second):
    """Two filters of `first` and `second` taps a side for each of `windows`: the second follows row by row."""
    image = Input("in", (windows, side, side))

    def filtered(name, source, taps):
        weights = Input(f"w_{name}", (taps, taps))
        size = source.shape[1] - taps + 1
        return Stage(
            name,
            (windows, size, size),
            lambda b, y, x: Reduce((taps, taps), lambda i, j: source[b, y + i, x + j] * weights[i, j]),
        )

    return (filtered("second", filtered("first", image, first), second),)


def exact(outputs, memory="pub", **options):
    """`outputs` mapped, after a run that gave the words of numpy."""
    mapped, data = mapping.compile(outputs, memory, **options), words(outputs)
    run = simulate.run(mapped, data)
    assert simulate.differing_words(mapped, outputs, data, run.outputs) == 0
    return mapped


def paces(mapped):
    """Cycles from one outer iteration to the next, of all statements."""
    return {mapped.schedule.strides[s.name][0] for s in mapped.program.statements}


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_random_stages_with_an_outer_loop(data):
    windows, memory = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["pub", "dp"]))
    if data.draw(st.booleans()):
        outputs = products(windows, data.draw(st.integers(5, 20)), data.draw(st.integers(2, 12)))
    else:
        outputs = filters(windows, data.draw(st.integers(9, 16)), *(data.draw(st.integers(2, 4)) for _ in range(2)))
    exact(outputs, memory)


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize("channels", [4, 16, 24])
def test_stages_begin_at_the_pace_of_the_longest(channels, memory):
    """The first stage is shorter than, as long as and longer than the second."""
    tokens = 16
    mapped = exact(products(6, tokens, channels), memory)
    assert paces(mapped) == {max(tokens * channels, tokens * tokens)}
    assert mapped.schedule.last_cycle < 7 * max(paces(mapped)) + tokens * channels + 64


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize("windows", rest_slow([2, 3, 8], 0, 2))
def test_a_buffer_between_stages_is_double_however_many_iterations_there_are(windows, memory):
    tokens = 16
    mapped = exact(products(windows, tokens, 4), memory)
    kept = mapped.wiring.layouts["first"]
    assert tokens < kept.live <= kept.size <= 2 * tokens


def test_a_place_is_written_again_two_iterations_later():
    """The address tells the outer index' parity: one iteration's words and the next one's have places of their own."""
    tokens = 16
    mapped = mapping.compile(products(6, tokens, 4), "dp")
    kept = mapped.wiring.layouts["first"]
    at = np.arange(6 * tokens).reshape(6, tokens) % kept.size
    for b in range(5):
        read = slice(None) if kept.size == 2 * tokens else slice(0, kept.size - tokens)
        assert not set(at[b]) & set(at[b + 1][read])


def test_one_iteration_has_nothing_to_overlap():
    assert not rates.has_outer(lower(products(1, 16, 4)))
    exact(products(1, 16, 4))


@pytest.mark.parametrize("what", ["all tokens of all windows", "a window behind"])
def test_loops_that_stages_do_not_pass_on_are_no_outer_loops(what):
    (first,) = products(4, 8, 4)
    if what == "a window behind":
        third = Stage("third", (3, 8), lambda b, t: Reduce((2,), lambda k: first[b + k, t]))
    else:
        third = Stage("third", (4, 8), lambda b, t: Reduce((4,), lambda k: first[k, t]))
    assert not rates.has_outer(lower((third,)))
    exact((third,))


def test_a_mapping_without_one_of_its_parts_fails():
    outputs = apps.program("mixer-16")
    mapped, data = mapping.compile(outputs), words(outputs)
    assert not fails(mapped, outputs, data)
    for what, fewer in without_parts(mapped):
        assert fails(fewer, outputs, data), what


def test_a_buffer_that_is_not_double_gives_other_words():
    outputs = products(6, 16, 4)
    mapped, data = mapping.compile(outputs, "dp"), words(outputs)
    (number,) = (k for k, t in enumerate(mapped.tiles) if t.buffers == ("first",))
    tile = mapped.tiles[number]
    # Every iteration in the first one's places.
    single = {
        name: structs.replace(g, addresses={n: _without(g.extents, a, 16) for n, a in g.addresses.items()})
        for name, g in tile.controllers.items()
    }
    assert single != tile.controllers
    tiles = (*mapped.tiles[:number], dataclasses.replace(tile, controllers=single), *mapped.tiles[number + 1 :])
    assert fails(dataclasses.replace(mapped, tiles=tiles), outputs, data)


def _without(extents, address, pitch):
    """An address whose outer index counts for nothing."""
    steps = zip(extents, address.strides, strict=True)
    return structs.replace(address, strides=tuple(0 if s == pitch and e == 6 else s for e, s in steps))


@pytest.mark.parametrize(("app", "memory"), rest_slow([("layers-8", "dp"), ("mixer-16", "pub")], 0))
def test_the_rtl_gives_the_words_of_numpy(app, memory):
    extras.need("amaranth", "pyosys")
    outputs = apps.program(app)
    mapped, data = mapping.compile(outputs, memory), words(outputs)
    assert len(paces(mapped)) == 1
    for held in (None, np.random.default_rng(3).random(101) < 0.3):
        assert simulate.differing_words(mapped, outputs, data, netlist.run(mapped, data, held)) == 0
