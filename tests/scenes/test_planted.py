"""Planted maps have the density that was asked for, by explicit probabilities."""

import numpy as np
import pytest
import torch

from tilewright.core.errors import PatternError, UnknownNameError
from tilewright.slices import orders
from tilewright_study.scenes import planted
from tilewright_study.scenes.planted import Head

GRID, ROWS, HEAD_DIM = (6, 12, 16), 32, 64


def shares(made, head):
    """float64 [tokens, tokens]: softmax weights of a head, tokens in raster order."""
    q, k = (x[0, head].double().numpy() for x in (made.q, made.k))
    scores = q @ k.T / HEAD_DIM**0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def density(weights, recall, order):
    """Mean share of keys that the best list of a group of `ROWS` queries keeps."""
    groups = weights[order].reshape(-1, ROWS, len(weights)).mean(1)
    reached = np.cumsum(-np.sort(-groups), 1) >= recall * groups.sum(1, keepdims=True)
    return np.mean(reached.argmax(1) + 1) / len(weights)


@pytest.mark.parametrize("kind", planted.KINDS)
@pytest.mark.parametrize("asked", [0.1, 0.4])
def test_groups_need_the_share_of_keys_that_was_asked_for(kind, asked):
    made = planted.tokens(GRID, HEAD_DIM, [Head(kind, asked)], rows=ROWS)
    # Sixteen of 36 groups are measured.
    assert density(shares(made, 0), 0.95, orders.hilbert(GRID)) == pytest.approx(asked, rel=0.1)


def test_a_window_holds_the_share_of_attention_that_was_asked_for():
    made = planted.tokens(GRID, HEAD_DIM, [Head("local", 0.155, 0.7, window=True)])
    sides = planted.window(GRID, 0.155)
    assert np.prod(sides) / np.prod(GRID) == pytest.approx(0.155, rel=0.1)
    places = np.stack(np.unravel_index(np.arange(np.prod(GRID)), GRID), 1)
    first = np.clip(places - np.array(sides) // 2, 0, np.subtract(GRID, sides))
    inside = ((places >= first[:, None]) & (places < first[:, None] + sides)).all(2)
    assert np.array_equal(inside.sum(1), np.full(len(places), np.prod(sides)))
    assert (shares(made, 0) * inside).sum(1).mean() == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(("kind", "near"), [("spatial", [0]), ("temporal", [1, 2])])
def test_heads_attend_along_the_axes_of_their_kind(kind, near):
    """The keys that a query attends to are near it along the axes of its bands, compared with all keys."""
    weights = shares(planted.tokens(GRID, HEAD_DIM, [Head(kind, 0.2)], rows=ROWS), 0)
    places = np.stack(np.unravel_index(np.arange(np.prod(GRID)), GRID), 1)
    apart = np.abs(places[:, None] - places)
    closer = [(weights * apart[..., axis]).sum(1).mean() / apart[..., axis].mean() for axis in range(3)]
    assert max(closer[axis] for axis in near) < 0.8 * min(closer[axis] for axis in range(3) if axis not in near)


def test_heads_of_content_attend_to_their_own_object():
    made = planted.tokens(GRID, HEAD_DIM, [Head("content", 0.2)], rows=ROWS)
    same = made.objects[:, None] == made.objects
    assert (shares(made, 0) * same.numpy()).sum(1).mean() > 3 * same.double().mean()


def test_the_seed_decides_what_is_drawn():
    one, again, other = (planted.tokens(GRID, HEAD_DIM, planted.mixed(2), seed=s, rows=ROWS) for s in (0, 0, 1))
    assert all(torch.equal(getattr(one, name), getattr(again, name)) for name in "qkv")
    assert not torch.equal(one.q, other.q)
    assert one.q.shape == one.k.shape == one.v.shape == (1, 2, np.prod(GRID), HEAD_DIM)


def test_mixed_heads_have_every_kind_and_density():
    heads = planted.mixed(12)
    assert {head.kind for head in heads} == {*planted.KINDS}
    assert {head.density for head in heads if not head.window} == {0.05, 0.1, 0.2, 0.4}
    assert sum(head.window for head in heads) == 1


def test_a_density_that_is_out_of_reach_is_refused():
    with pytest.raises(PatternError, match="expected a density that this kind reaches"):
        planted.tokens((2, 4, 4), HEAD_DIM, [Head("local", 0.001)], rows=8)


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnknownNameError, match="local, spatial, temporal, content"):
        planted.tokens(GRID, HEAD_DIM, [Head("global", 0.1)])


@pytest.mark.parametrize("head_dim", [10, 63])
def test_a_head_dim_has_pairs_for_each_axis(head_dim):
    with pytest.raises(PatternError, match="expected an even number of at least 12"):
        planted.tokens(GRID, head_dim, planted.mixed(1))
