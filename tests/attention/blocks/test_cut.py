import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.attention.blocks.cut import (
    GROUP_KEYS,
    GROUP_ROWS,
    best_gathered,
    cut,
    regions,
    unions,
)
from tilewright.core.errors import PatternError, TileError
from tilewright.graph import from_pattern


def cost(dense, ptr, width, gathered, overhead=GROUP_KEYS):
    """The objective of `cut`, restated on the dense pattern."""
    total = 0
    for lo, hi in itertools.pairwise(ptr):
        keys = np.flatnonzero(dense[lo:hi].any(0))
        padded = -(-len(keys) // width) * width if gathered else len(set(keys // width)) * width
        total += (hi - lo + GROUP_ROWS) * (padded + overhead) if padded else 0
    return total


def partitions(n, rows, bounds=()):
    """All boundaries of partitions of 0..n into groups of at most `rows` that keep `bounds`."""
    for inner in itertools.product([False, True], repeat=n - 1):
        ptr = [0, *(i + 1 for i in range(n - 1) if inner[i]), n]
        if max(np.diff(ptr)) <= rows and set(bounds) <= set(ptr):
            yield ptr


def random_dense(seed, n_rows, n_cols, density, repeat):
    rng = np.random.default_rng(seed)
    dense = np.repeat(rng.random((n_rows, n_cols)) < density, repeat, axis=0)[:n_rows]
    dense[0, 0] = True
    return dense


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_rows=st.integers(1, 9),
    n_cols=st.integers(1, 40),
    density=st.sampled_from([0.02, 0.2, 0.7]),
    repeat=st.integers(1, 3),
    rows=st.sampled_from([1, 2, 4, 8]),
    width=st.sampled_from([1, 4, 8]),
    gathered=st.booleans(),
    overhead=st.sampled_from([0, 3, 40]),
    bounded=st.booleans(),
)
def test_cut_is_as_good_as_the_best_of_all_partitions(
    seed, n_rows, n_cols, density, repeat, rows, width, gathered, overhead, bounded
):
    dense = random_dense(seed, n_rows, n_cols, density, repeat)
    bounds = sorted({0, n_rows // 2, n_rows}) if bounded else None
    ptr = cut(from_pattern(dense), rows, width, gathered, bounds, overhead)
    assert ptr[0] == 0 and ptr[-1] == n_rows and (np.diff(ptr) > 0).all() and np.diff(ptr).max() <= rows
    assert set(bounds or ()) <= set(ptr.tolist())
    best = min(cost(dense, p, width, gathered, overhead) for p in partitions(n_rows, rows, bounds or ()))
    assert cost(dense, ptr, width, gathered, overhead) == best


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    density=st.sampled_from([0.02, 0.1]),
    width=st.sampled_from([1, 8, 16]),
    gathered=st.booleans(),
)
def test_unions_count_the_keys_or_blocks_of_each_group(seed, density, width, gathered):
    dense = random_dense(seed, 30, 50, density, 1 + seed % 3)
    ptr = [0, 1, 8, 9, 25, 30]
    groups = [np.flatnonzero(dense[lo:hi].any(0)) for lo, hi in itertools.pairwise(ptr)]
    expected = [len(set(keys // (1 if gathered else width))) for keys in groups]
    assert unions(from_pattern(dense), ptr, width, gathered).tolist() == expected


@pytest.mark.parametrize("multiple", [1, 8, 32])
def test_gathered_work_counts_the_rows_that_a_group_is_padded_to(multiple):
    dense = random_dense(3, 90, 120, 0.05, 2)
    ptr, work = best_gathered(from_pattern(dense), 64, multiple)
    padded = [-(-(hi - lo) // multiple) * multiple * dense[lo:hi].any(0).sum() for lo, hi in itertools.pairwise(ptr)]
    assert ptr.tolist() == cut(from_pattern(dense), 64, 16, True).tolist()
    assert work == pytest.approx(sum(padded) / dense.size)


def test_a_global_row_is_cut_out_of_its_neighbours():
    dense = np.zeros((97, 600), bool)
    dense[:, :40] = True
    dense[48] = True
    ptr = cut(from_pattern(dense), 64, 16, True)
    assert {48, 49} <= set(ptr.tolist())


def test_equal_rows_stay_together():
    dense = np.repeat(np.kron(np.eye(6, dtype=bool), np.ones((1, 50), bool)), 49, axis=0)
    graph = from_pattern(dense)
    assert cut(graph, 64, 16, True).tolist() == list(range(0, 295, 49))
    assert regions(graph).tolist() == [0, 98, 196, 294]


@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 3, 3, 5], [5]])
def test_bounds_that_are_no_boundaries_are_refused(bounds):
    with pytest.raises(PatternError, match="expected ascending row numbers from 0 to 5"):
        cut(from_pattern(np.eye(5, dtype=bool)), 4, 16, True, bounds)


def test_groups_of_no_rows_are_refused():
    with pytest.raises(TileError, match="expected at least 1, found 0"):
        regions(from_pattern(np.eye(5, dtype=bool)), 0)
