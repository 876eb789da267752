"""Orders of the tokens of a 3-D grid."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.core.errors import PatternError, UnknownNameError
from tilewright.slices import orders

GRIDS = st.tuples(*[st.integers(1, 17)] * 3)
# Latent grids of video networks: 480p of 33 and 81 frames, 720p.
VIDEOS = [(9, 20, 26), (9, 30, 52), (21, 30, 52), (21, 45, 80), (33, 45, 80)]


def places(grid, order):
    """int [tokens, 3]: frame, row and column of each token in its new place."""
    return np.stack(np.unravel_index(order, grid), 1)


def steps(grid, order):
    return np.abs(np.diff(places(grid, order), axis=0)).sum(1)


def spread(grid, order, rows=128):
    """Mean distance of the tokens of a group from its middle; groups of `rows`."""
    groups = places(grid, order)[: len(order) // rows * rows].reshape(-1, rows, 3)
    return np.sqrt(((groups - groups.mean(1, keepdims=True)) ** 2).sum(2)).mean()


@pytest.mark.parametrize("name", orders.NAMES)
@given(grid=GRIDS)
@settings(max_examples=50, deadline=None)
def test_an_order_holds_every_token_once(name, grid):
    order = orders.order(name, grid)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(np.prod(grid)))


@given(grid=GRIDS)
@settings(max_examples=200, deadline=None)
def test_hilberts_curve_steps_to_neighbours_alone(grid):
    assert set(steps(grid, orders.hilbert(grid))) <= {1}


@pytest.mark.parametrize("grid", VIDEOS, ids=str)
def test_hilberts_curve_steps_to_neighbours_in_videos(grid):
    assert set(steps(grid, orders.hilbert(grid))) == {1}


@given(grid=GRIDS, tokens=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_voxels_are_boxes_of_at_most_as_many_tokens(grid, tokens):
    boxes = list(orders._boxes(grid, tokens))
    assert max(box.size for box in boxes) <= tokens
    for box in boxes:
        corner = np.array(np.unravel_index(box.min(), grid))
        assert np.array_equal(np.unravel_index(box.max(), grid), corner + box.shape - 1)
    assert np.array_equal(orders.voxel(grid, tokens), np.concatenate([box.ravel() for box in boxes]))


def test_voxels_are_no_smaller_than_they_must_be():
    assert {box.shape for box in orders._boxes((16, 16, 16), 128)} == {(8, 4, 4)}
    assert {box.shape for box in orders._boxes((4, 5, 6), 128)} == {(4, 5, 6)}


@pytest.mark.parametrize("grid", VIDEOS, ids=str)
def test_groups_of_128_lie_closer_together_than_in_raster_order(grid):
    raster, voxel, hilbert = (spread(grid, orders.order(name, grid)) for name in orders.NAMES)
    assert voxel < 0.5 * raster
    # A ball of 128 tokens has 2.3.
    assert hilbert < 3.3


def test_raster_order_is_that_of_the_tokens():
    assert np.array_equal(orders.raster((2, 3, 4)), np.arange(24))


@pytest.mark.parametrize("name", orders.NAMES)
@pytest.mark.parametrize("grid", [(3, 4), (0, 3, 4)], ids=str)
def test_a_grid_has_three_sizes(name, grid):
    with pytest.raises(PatternError, match="expected three sizes"):
        orders.order(name, grid)


def test_a_voxel_has_a_token():
    with pytest.raises(PatternError, match="expected at least 1, found 0"):
        orders.voxel((2, 2, 2), 0)


def test_an_unknown_order_is_refused():
    with pytest.raises(UnknownNameError, match="raster, voxel, hilbert"):
        orders.order("morton", (2, 2, 2))
