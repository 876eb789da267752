"""T2: what masks add to the steps of a GPU is told from their factors."""

import numpy as np
import pytest

from tilewright.attention import backends
from tilewright.attention.cuda.mask_cost import mask_cost
from tilewright.graph import from_pattern


def windows(side, reach):
    y, x = np.divmod(np.arange(side * side), side)
    return np.maximum(abs(y[:, None] - y), abs(x[:, None] - x)) <= reach


def groups(graph, rows=64):
    return np.append(np.arange(0, graph.n_rows, rows), graph.n_rows)


def test_windows_of_squares_have_sixteen_factors():
    y, x = np.divmod(np.arange(576), 24)
    squares = np.lexsort((x, y, x // 8, y // 8))
    graph = from_pattern(windows(24, 5)[squares][:, squares])
    assert mask_cost(graph, groups(graph), 64) == 1 + 16 / 128
    assert mask_cost(graph, groups(graph), 32) == 1 + 16 / 64


def test_masks_without_factors_cost_as_the_greatest_rank():
    graph = from_pattern(np.random.default_rng(0).random((128, 256)) < 0.3)
    assert mask_cost(graph, groups(graph), 64) == 1 + 32 / 128
    at = np.arange(640)
    graph = from_pattern(np.abs(at[:, None] - at) <= 64)
    assert mask_cost(graph, groups(graph), 64) == 1 + 32 / 128
    assert mask_cost(graph, groups(graph, 32), 64) == 1 + 32 / 128


@pytest.mark.parametrize("dense", [np.ones((70, 9), bool), np.kron(np.eye(2, dtype=bool), np.ones((64, 3), bool))])
def test_full_groups_need_no_mask(dense):
    graph = from_pattern(dense)
    assert mask_cost(graph, groups(graph), 64) == 1


def test_the_costliest_group_of_the_sample_decides():
    dense = np.zeros((128, 96), bool)
    dense[:64, :64] = True
    dense[64:, 64:] = np.random.default_rng(0).random((64, 32)) < 0.5
    graph = from_pattern(dense)
    assert mask_cost(graph, groups(graph), 64) > mask_cost(graph, np.array([0, 64]), 64) == 1


def test_a_target_may_apply_masks_at_no_cost():
    graph = from_pattern(np.random.default_rng(0).random((128, 64)) < 0.3)
    assert backends.mask_cost("cpu", graph, groups(graph), 64) == 1
    assert backends.mask_cost("cuda", graph, groups(graph), 64) == mask_cost(graph, groups(graph), 64)
