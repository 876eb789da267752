import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import graph
from tilewright.attention import blocks
from tilewright.attention.blocks import tiles, work


def padding(values, weights, steps):
    """Weighted padding when each value is raised to the next of `steps`; infinite when one exceeds them all."""
    raised = [min((s for s in steps if s >= v), default=np.inf) for v in values]
    return sum(w * (r - v) for v, w, r in zip(values, weights, raised, strict=True))


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=12),
    steps=st.integers(1, 4),
)
def test_ladder_pads_as_little_as_the_best_of_all_choices(pairs, steps):
    values, weights = map(list, zip(*pairs, strict=True))
    chosen = work.ladder(values, weights, steps)
    distinct = sorted(set(values))
    assert set(chosen) <= set(distinct) and len(chosen) <= steps and (np.diff(chosen) > 0).all()
    best = min(
        padding(values, weights, choice)
        for n in range(1, steps + 1)
        for choice in itertools.combinations(distinct, min(n, len(distinct)))
        if choice[-1] == distinct[-1]
    )
    assert padding(values, weights, chosen) == best


def test_ladder_of_many_values_stays_close_to_the_best():
    values = np.arange(1, 2001)
    chosen = work.ladder(values, np.ones(2000), 4)
    # The best four steps of evenly spread values are the quarters.
    assert chosen[-1] == 2000 and len(chosen) == 4
    assert padding(values, np.ones(2000), chosen) <= 1.02 * padding(values, np.ones(2000), [500, 1000, 1500, 2000])


def random_blocks(seed, n_rows=60, n_cols=300):
    rng = np.random.default_rng(seed)
    dense = np.repeat(rng.random((n_rows, n_cols)) < 0.1, 1 + seed % 5, axis=0)[:n_rows]
    dense[rng.random(n_rows) < 0.2] = False
    dense[seed % n_rows] = True
    return blocks.extract(graph.from_pattern(dense), tiles.parse(("16x1", "4x8", "32x32")[seed % 3]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), split_keys=st.sampled_from([None, 1, 32, 100, 10**6]))
def test_items_hold_every_run_once_and_fit_their_class(seed, split_keys):
    cover = random_blocks(seed)
    items = work.items(cover, split_keys)
    length = items.run_hi - items.run_lo
    keys = length * cover.tile.run
    most = np.inf if split_keys is None else max(split_keys, cover.tile.run, work.PART * keys.sum())
    assert (length > 0).all() and (keys[items.split] <= most).all()
    assert (keys[~items.split] <= max(most, work.WHOLE * keys.sum())).all()
    # Runs are taken in order, without gap: each exactly once.
    assert np.array_equal(np.r_[0, items.run_hi], np.r_[items.run_lo, len(cover.run_mask)])
    assert (items.run_lo >= cover.run_ptr[items.block]).all() and (items.run_hi <= cover.run_ptr[items.block + 1]).all()
    assert np.array_equal(items.split, np.bincount(items.block)[items.block] > 1)
    for part in np.split(length, np.flatnonzero(np.diff(items.block)) + 1):
        assert part.max() - part.min() <= 1
    assert (cover.rows[items.block] <= items.shape_rows[items.shape]).all()
    assert (length <= items.shape_runs[items.shape]).all()
    partial = [(cover.run_mask[lo:hi] >= 0).any() for lo, hi in zip(items.run_lo, items.run_hi, strict=True)]
    padded = length < items.shape_runs[items.shape]
    assert np.array_equal(items.shape_masked[items.shape], partial | padded)
    assert np.array_equal(items.shape_split[items.shape], items.split)
    assert (items.counts > 0).all() and items.counts.sum() == len(items.block)
    assert len(np.unique(items.shape_rows)) <= work.ROW_STEPS
    shapes = np.stack([items.shape_rows, items.shape_runs, items.shape_masked, items.shape_split])
    assert len(np.unique(shapes, axis=1).T) == items.n_shapes


def test_only_blocks_with_many_more_keys_than_the_rest_are_split():
    alike = full_blocks([16] * 50, [40] * 50)
    assert not work.items(alike, 16).split.any()
    few = full_blocks([16] * 4, [40] * 4)
    assert work.items(few, 16).split.all()
    outlier = work.items(full_blocks([16] * 51, [40] * 50 + [4000]), 16)
    assert np.array_equal(np.unique(outlier.block[outlier.split]), [50])
    # A part has a 256th of all keys here, not 16: runs of one key.
    assert outlier.split.sum() == -(-4000 // (6000 // 256))


@pytest.mark.parametrize("split_keys", [None, 64])
def test_items_are_the_same_each_time(split_keys):
    one, other = work.items(random_blocks(7), split_keys), work.items(random_blocks(7), split_keys)
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def full_blocks(rows, runs):
    """Blocks of so many rows and runs each, all runs full."""
    run_ptr = np.concatenate(([0], np.cumsum(runs)))
    run_mask = np.full(run_ptr[-1], -1, np.int32)
    return SimpleNamespace(
        meta={}, tile=tiles.parse("16x1"), rows=np.array(rows), runs=np.array(runs), run_ptr=run_ptr, run_mask=run_mask
    )


def test_an_item_of_full_runs_is_masked_where_it_is_padded():
    items = work.items(full_blocks([16] * 8, [1, 2, 3, 4, 10, 20, 40, 40]), None)
    padded = (items.run_hi - items.run_lo) < items.shape_runs[items.shape]
    assert padded.any() and np.array_equal(items.shape_masked[items.shape], padded)


def test_a_long_block_is_split_into_near_equal_parts():
    items = work.items(full_blocks([1, 16], [10, 3]), 4 * 16)
    assert items.run_hi.tolist() == [3, 6, 10, 13]
    assert items.split.tolist() == [True, True, True, False]
    assert list(zip(items.shape_rows, items.shape_runs, strict=True)) == [(1, 3), (1, 4), (16, 3)]
