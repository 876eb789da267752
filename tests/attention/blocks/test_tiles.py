import numpy as np
import pytest

from tilewright.attention.blocks.tiles import (
    SLICE_RUN,
    Tile,
    aligned_keys,
    check_fits,
    fitting,
    parse,
)
from tilewright.core.errors import TileError


@pytest.mark.parametrize("name", ["1x1", "16x16", "64x1", "128x128", "4x8", "128x1"])
def test_a_name_reads_back_as_itself(name):
    assert parse(name).name == name


def test_a_slice_packs_its_keys_and_a_block_tile_does_not():
    assert (parse("64x1").gathered, parse("64x1").run) == (True, SLICE_RUN)
    assert (parse("64x32").gathered, parse("64x32").run) == (False, 32)


@pytest.mark.parametrize(
    "name", ["", "64", "64x", "x64", "064x1", "64x64\n", "64X64", "-1x1", "0x1", "1x1x1", None, 64]
)
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(TileError, match="expected MxN such as 64x64 or 64x1"):
        parse(name)


@pytest.mark.parametrize("name", ["48x1", "256x1"])
def test_rows_out_of_range_are_refused(name):
    with pytest.raises(TileError, match="rows must be a power of two from 1 to 128"):
        parse(name)


@pytest.mark.parametrize("name", ["16x2", "16x4", "16x24", "16x256"])
def test_keys_out_of_range_are_refused(name):
    with pytest.raises(TileError, match="keys must be 1 or a power of two from 8 to 128"):
        parse(name)


@pytest.mark.parametrize("tile, shape", [("64x64", (50, 50)), ("1x1", (1, 1)), ("64x1", (33, 1)), ("16x16", (1, 9))])
def test_a_tile_less_than_twice_the_graph_fits(tile, shape):
    check_fits(parse(tile), shape)


@pytest.mark.parametrize(
    "tile, shape, message",
    [
        ("64x1", (32, 999), "at most 32 queries for 32, found 64"),
        ("32x1", (1, 1), "at most 16 queries for 1, found 32"),
        ("16x64", (50, 20), "at most 32 keys for 20, found 64"),
    ],
)
def test_a_tile_of_twice_the_graph_is_refused(tile, shape, message):
    with pytest.raises(TileError, match=rf"tile {tile} is larger than the graph: expected {message}"):
        check_fits(parse(tile), shape)


@pytest.mark.parametrize(
    ("shape", "fewest", "found"),
    [
        ((50, 50), 16, ("32x1", "64x1", "64x64")),
        ((50, 32), 16, ("32x1", "64x1")),
        ((17, 99), 1, ("32x1",)),
        ((16, 99), 1, ("16x1",)),
        ((5, 3), 1, ("8x1",)),
        ((5, 3), 16, ("16x1",)),
        ((1, 1), 1, ("1x1",)),
    ],
)
def test_tiles_that_fit_are_taken_and_else_the_smallest(shape, fewest, found):
    assert fitting(("32x1", "64x1", "64x64"), shape, fewest) == found
    for name in found:
        check_fits(parse(name), shape)


def test_aligned_keys_end_with_the_graph():
    keys = aligned_keys(np.array([[0], [8]], np.int32), 8, 11)
    assert keys.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, -1, -1, -1, -1, -1]]
    assert Tile(4, 8).run == keys.shape[1]
