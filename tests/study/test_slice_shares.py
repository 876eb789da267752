"""Shares, recall and errors against explicit probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import reference, slices
from tilewright_study.measure import slice_shares

ROWS = 16


def qkv(n_q, n_k, seed=0, head_dim=32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, head_dim, generator=generator) for n in (n_q, n_k, n_k))


@pytest.mark.parametrize("n_q", [1, 15, 16, 33, 64])
def test_shares_of_a_group_are_the_mean_of_its_queries(n_q):
    q, k, _ = qkv(n_q, 50)
    groups = torch.arange(-(-n_q // ROWS))
    weights = torch.softmax(q.double() @ k.double().T / 32**0.5, -1)
    expected = torch.stack([part.mean(0) for part in weights.split(ROWS)])
    found = slice_shares.group_shares(q, k, groups, rows=ROWS)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_shares_do_not_depend_on_how_many_scores_are_computed_at_a_time(monkeypatch):
    q, k, _ = qkv(100, 50)
    whole = slice_shares.group_shares(q, k, torch.arange(7), rows=ROWS)
    monkeypatch.setattr(slice_shares, "_SLAB_SCORES", 1)
    torch.testing.assert_close(slice_shares.group_shares(q, k, torch.arange(7), rows=ROWS), whole)


@given(n=st.integers(1, 60), width=st.integers(1, 20), recall=st.floats(0.05, 1), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_the_fewest_runs_that_reach_a_recall_are_kept(n, width, recall, seed):
    shares = torch.rand(3, n, generator=torch.Generator().manual_seed(seed))
    runs = slice_shares.run_shares(shares, width)
    assert runs.shape == (3, -(-n // width))
    assert torch.allclose(runs.sum(1), shares.sum(1))
    ranking = slice_shares.Ranked(runs)
    kept = ranking.counts(recall)
    which = ranking.mask(kept)
    assert torch.allclose(ranking.kept(kept), (runs * which).sum(1).double())
    assert torch.equal(which.sum(1), kept)
    for own, count, mask in zip(runs.double().numpy(), kept.tolist(), which.numpy(), strict=True):
        ranked = np.sort(own)[::-1]
        assert own[mask].sum() >= recall * own.sum() * (1 - 1e-9)
        assert ranked[: count - 1].sum() < recall * own.sum() or count == 1
        assert np.allclose(own[mask].sum(), ranked[:count].sum())


def test_errors_stay_below_their_bound():
    q, k, v = (x.double() for x in qkv(64, 50))
    scores = q @ k.T / 32**0.5
    listed = torch.rand(64, 50, generator=torch.Generator().manual_seed(1)) < 0.5
    listed[:, 0] = True
    dense, kept = torch.softmax(scores, 1), torch.softmax(scores.masked_fill(~listed, -math.inf), 1)
    recall = (dense * listed).sum(1)
    apart = ((kept - dense) @ v).abs().amax(1)
    bound = slice_shares.error_bound(recall[None, None], v[None, None])[0, 0]
    assert (apart <= bound).all()
    # The bound is met where what is kept and what is lost have opposite values of largest size.
    v = torch.where(listed[0], 3.0, -3.0).double()[:, None]
    bound = slice_shares.error_bound(recall[None, None], v[None, None])[0, 0]
    assert ((kept[0] - dense[0]) @ v).abs() == pytest.approx(float(bound[0]))


def test_errors_of_a_result_are_those_of_the_formulas():
    expected = torch.tensor([[3.0, -4.0], [0.0, 5.0]])
    found = expected + torch.tensor([[0.0, 1.0], [-2.0, 0.0]])
    errors = slice_shares.errors(found, expected)
    assert errors["l1"] == pytest.approx(3 / 12)
    assert errors["largest"] == 2
    assert errors["cosine"] == pytest.approx(float(np.dot([3, -3, -2, 5], [3, -4, 0, 5]) / (47 * 50) ** 0.5))
    assert slice_shares.errors(expected, expected) == {"l1": 0, "cosine": pytest.approx(1), "largest": 0}


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 70), st.integers(1, 70)),
    text=st.sampled_from([(0, 0), (3, 0), (0, 5)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_attention_of_rows_is_that_over_the_graph_of_lists(sizes, text, seed):
    batch, heads, n, n_k = sizes
    n_q, n_k = n + sum(text), max(n_k, sum(text) + 1)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, n_q, 16, generator=generator)
    k, v = (torch.randn(batch, heads, n_k, 16, generator=generator) for _ in range(2))
    mask = torch.rand(batch, heads, -(-n // ROWS), n_k, generator=generator) < 0.3
    lists = slices.from_mask(mask, n_q, rows=ROWS, budget=1.0, text=text)
    rows = np.flatnonzero(np.random.default_rng(seed).random(n_q) < 0.7)
    found = slice_shares.attention_rows(lists, torch.from_numpy(rows), q, k, v)
    expected = [
        torch.cat(
            [
                reference.attention_rows(lists.graph(b, h), rows, *(x[b : b + 1, h : h + 1] for x in (q, k, v)))
                for h in range(heads)
            ],
            1,
        )
        for b in range(batch)
    ]
    torch.testing.assert_close(found, torch.cat(expected))


def test_attention_of_rows_does_not_depend_on_how_many_are_computed_at_a_time(monkeypatch):
    q, k, v = (x[None, None] for x in qkv(100, 50))
    lists = slices.from_mask(torch.rand(1, 1, 7, 50) < 0.4, 100, rows=ROWS, budget=1.0)
    rows = torch.arange(0, 100, 3)
    whole = slice_shares.attention_rows(lists, rows, q, k, v)
    monkeypatch.setattr(slice_shares, "_SLAB_SCORES", 1)
    torch.testing.assert_close(slice_shares.attention_rows(lists, rows, q, k, v), whole)
