"""Chains of tiles: buffers whose distances vary and that no tile holds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.cases import rest_slow
from helpers.push import fails, without_parts, words
from tilewright.pushmem import configuration, mapping, netlist, simulate, storage
from tilewright.pushmem.dsl import Input, Stage
from tilewright.pushmem.errors import MappingError
from tilewright_study.experiments.push import apps

CAPACITY = 2048


def chains(mapped):
    """Tiles of each chain of `mapped`."""
    return [t.chain.count for t in mapped.tiles if t.chain is not None and t.chain.index == 0]


def turned(height, width):
    """An image of which columns become rows."""
    image = Input("in", (height, width))
    return (Stage("turned", (width, height), lambda y, x: image[x, y]),)


def exact(outputs, memory="pub"):
    """`outputs` mapped, after a run that gave the words of numpy."""
    mapped, data = mapping.compile(outputs, memory), words(outputs)
    run = simulate.run(mapped, data)
    assert simulate.differing_words(mapped, outputs, data, run.outputs) == 0
    return mapped


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_words_that_live_together_have_places_of_their_own(data):
    """Against all pairs: the tile and the place of every two words that conflict differ."""
    capacity = data.draw(st.sampled_from([4, 8, 16]))
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 8)))
    n = shape[0] * shape[1]
    write = np.array(data.draw(st.permutations(range(n))))
    last = write + np.array(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)))
    addresses = np.arange(n)
    kept = storage.layout(addresses, write, last)
    count = storage.tiles(kept.size, int(addresses.max()) + 1, capacity)
    mask = (1 << (count - 1).bit_length()) - 1
    tile, place = addresses // capacity & mask, addresses % capacity
    assert tile.max() < count
    for v in range(n):
        together = (write <= last[v]) & (write[v] <= last)
        together[v] = False
        assert not (together & (tile == tile[v]) & (place == place[v])).any()


@settings(max_examples=8, deadline=None)
@given(st.integers(24, 80), st.integers(24, 80), st.sampled_from(["pub", "dp"]))
def test_turned_images_of_any_shape(height, width, memory):
    mapped = exact(turned(height, width), memory)
    (size,) = (kept.size for kept in mapped.wiring.layouts.values())
    assert bool(chains(mapped)) == (size > CAPACITY)


@pytest.mark.parametrize("memory", ["pub", "dp"])
def test_a_tile_holds_2048_words_and_one_more_takes_a_chain(memory):
    sizes = {}
    for width in range(60, 72, 4):
        mapped = exact(turned(32, width), memory)
        (kept,) = mapped.wiring.layouts.values()
        sizes[kept.size] = len(mapped.tiles)
    assert {size: 1 + (size > CAPACITY) for size in sizes} == sizes
    assert min(sizes) <= CAPACITY < max(sizes)


def test_the_last_word_of_a_tile_and_the_first_of_the_next():
    mapped, data = exact(turned(64, 64)), words(turned(64, 64), value=0)
    assert chains(mapped) == [2]
    for address in (CAPACITY - 1, CAPACITY):
        data["in"].ravel()[address] = 1 + address
    found = simulate.run(mapped, data).outputs["turned"]
    np.testing.assert_array_equal(found, data["in"].T)
    assert sorted(found[found > 0]) == [CAPACITY, CAPACITY + 1]


@pytest.mark.parametrize(("side", "tiles"), rest_slow([(64, 2), (76, 3), (77, 4), (100, 5)], 1, 2))
def test_a_chain_has_as_many_tiles_as_its_words_need(side, tiles):
    assert chains(exact(apps.program(f"transpose-{side}"))) == [tiles]


@pytest.mark.parametrize("app", rest_slow(["transpose-76", "channels-62"], 0))
def test_a_chain_without_one_of_its_parts_fails(app):
    outputs = apps.program(app)
    mapped, data = mapping.compile(outputs), words(outputs)
    assert chains(mapped) and not fails(mapped, outputs, data)
    for what, fewer in without_parts(mapped):
        assert fails(fewer, outputs, data), what
    # Nor do two tiles have one number: words of the other are then nowhere.
    _, other = (k for k, t in enumerate(mapped.tiles) if t.chain is not None and t.chain.index < 2)
    twice = list(mapped.tiles)
    twice[other] = dataclasses.replace(twice[other], chain=dataclasses.replace(twice[other].chain, index=0))
    assert fails(dataclasses.replace(mapped, tiles=tuple(twice)), outputs, data)


def test_tiles_of_a_chain_have_one_configuration_and_numbers_of_their_own():
    mapped = mapping.compile(apps.program("transpose-76"))
    made = configuration.configurations(mapped)
    assert made[0] == made[1] == made[2]
    assert [configuration.place(t)["chain_index"] for t in mapped.tiles] == [0, 1, 2]
    assert [configuration.place(t)["chain_mask"] for t in mapped.tiles] == [3, 3, 3]
    # What a tile of a chain delivers is no example of what it keeps.
    assert configuration.from_streams(mapped) == [None, None, None]


def test_more_tiles_than_the_array_has():
    with pytest.raises(MappingError, match=r"needs? .*13[0-9].* tiles.*128"):
        mapping.compile(turned(520, 520))


@pytest.mark.parametrize(("app", "memory"), rest_slow([("transpose-77", "pub"), ("channels-46", "dp")], 1))
def test_the_rtl_of_a_chain_gives_the_words_of_numpy(app, memory):
    extras.need("amaranth", "pyosys")
    outputs = apps.program(app)
    mapped, data = mapping.compile(outputs, memory), words(outputs)
    assert chains(mapped)
    for held in (None, np.random.default_rng(3).random(101) < 0.3):
        assert simulate.differing_words(mapped, outputs, data, netlist.run(mapped, data, held)) == 0
