"""What lists leave out, estimated from the mean query of each group."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import library

from helpers.slices import DTYPES, mask_of, qkv
from tilewright import reference, slices
from tilewright.core.errors import PatternError

SCALE = 64**-0.5


def left_out(lists):
    """bool [B, H, G, N_k]: the keys that count and are not listed."""
    layout = lists.layout
    found = torch.ones(*lists.counts.shape, layout.keys, dtype=torch.bool)
    for place in np.ndindex(*lists.counts.shape):
        found[place][lists.keys[place][: lists.counts[place]].long().cpu()] = False
        found[place][layout.keys if lists.lengths is None else int(lists.lengths[place[0]]) :] = False
    return found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_rest_is_attention_of_mean_queries_to_the_keys_that_are_left_out(data, device):
    n_q, n_k = data.draw(st.integers(1, 70), "N_q"), data.draw(st.integers(1, 140), "N_k")
    groups = -(-n_q // 16)
    draw = st.sampled_from([0, 1, 63, 64, 65, n_k])
    counts = [[[min(n_k, data.draw(draw)) for _ in range(groups)] for _ in range(2)] for _ in range(2)]
    lists = slices.from_mask(mask_of(counts, n_k).to(device), n_q, rows=16)
    q, k, v = qkv(2, 2, n_q, n_k, 64, dtype=data.draw(st.sampled_from(DTYPES), "dtype"), device=device)
    out, lse = slices.rest(q, k, v, lists)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    mask = left_out(lists)
    for b, h, g in np.ndindex(*lists.counts.shape):
        group = slice(16 * g, min(16 * g + 16, n_q))
        mean = q[b, h, group].double().mean(0).to(q.dtype).double().cpu()
        keys = mask[b, h, g]
        if not keys.any():
            assert not out[b, h, group].any() and (lse[b, h, group] == -torch.inf).all()
            continue
        scores = k[b, h].double().cpu()[keys] @ mean * SCALE
        right = scores.softmax(0) @ v[b, h].double().cpu()[keys]
        tolerance = 4 * reference.TOLERANCE[q.dtype]
        assert (out[b, h, group].double().cpu() - right).abs().max() <= tolerance * v.abs().max()
        assert (lse[b, h, group].double().cpu() - scores.logsumexp(0)).abs().max() <= 10 * tolerance


@pytest.mark.parametrize("text", [(0, 0), (21, 0), (0, 30)])
def test_equal_queries_attend_to_all_keys_by_lists_and_the_rest(text, device, predicted):
    q, k, v = qkv(2, 2, 150, 150, 64, device=device)
    video = slice(text[0], 150 - text[1])
    q[:, :, video] = q[:, :, video][:, :, ::32].repeat_interleave(32, 2)[:, :, : q[:, :, video].shape[2]]
    lengths = torch.tensor([150, 125], device=device)
    lists = slices.predict(q, k, keep=0.5, budget=0.8, rows=32, text=text, lengths=lengths)
    found, lse = slices.merge(slices.attend(q, k, v, lists, lse=True), slices.rest(q, k, v, lists))
    right, sums = slices.dense(q, k, v, lengths=lengths)
    assert reference.relative_error(found, right) <= 4 * reference.TOLERANCE[torch.float32]
    torch.testing.assert_close(lse, sums, rtol=0, atol=1e-4)


@pytest.fixture
def predicted(request, device, monkeypatch):
    """Keys are chosen where lists are made."""
    from tilewright.slices import prediction

    kind = request.node.callspec.params["device"]
    monkeypatch.setitem(prediction.SELECTIONS, device.type, f"tilewright.slices.{kind}.selection")
    prediction._selection.cache_clear()
    yield
    prediction._selection.cache_clear()


def test_a_few_groups_at_a_time_have_the_same_rest(monkeypatch):
    q, k, v = qkv(1, 2, 150, 140, 64)
    lists = slices.from_mask(mask_of([[[5, 0, 70], [140, 1, 64]]], 140), 150, rows=64)
    whole = slices.rest(q, k, v, lists)
    monkeypatch.setattr("tilewright.slices.remainder._PAIRS", 200)
    for one, other in zip(slices.rest(q, k, v, lists), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("delta", [False, True])
def test_steps_add_the_rest(delta):
    q, k, v = qkv(1, 2, 150, 150, 64)
    stated = {"keep": 0.4, "budget": 0.5, "rows": 32}
    steps = slices.Steps(refresh=(0,), first_dense=0, rest=True, delta=delta, **stated)
    lists = slices.predict(q, k, **stated)
    expected, _ = slices.merge(slices.attend(q, k, v, lists, lse=True), slices.rest(q, k, v, lists))
    dense, _ = slices.dense(q, k, v)
    first = steps(0, 0, 0, q, k, v)
    torch.testing.assert_close(first, dense if delta else expected)
    # What the rest has found is no more missed.
    torch.testing.assert_close(steps(0, 1, 0, q, k, v), dense if delta else expected)


def test_lists_that_did_not_fit_stay_nan():
    q, k, v = qkv(1, 1, 16, 140, 64)
    lists = slices.from_mask(mask_of([[[100]]], 140), 16, rows=16, budget=0.2)
    found, _ = slices.merge(slices.attend(q, k, v, lists, lse=True), slices.rest(q, k, v, lists))
    assert found.isnan().all()


def test_the_operator_is_well_formed():
    q, k, v = qkv(1, 1, 40, 60, 64)
    lists = slices.from_mask(mask_of([[[30, 0, 60]]], 60), 40, rows=16)
    given = lists.keys, lists.counts, q, k, v, None, SCALE, list(lists.layout)
    library.opcheck(torch.ops.tilewright.slices_rest.default, given, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda q: slices.rest(q, k, v, lists), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q)[0], slices.rest(q, k, v, lists)[0])


def test_tokens_are_those_of_the_lists():
    q, k, v = qkv(1, 1, 40, 60, 64)
    lists = slices.from_mask(mask_of([[[30, 0, 60]]], 60), 40, rows=16)
    with pytest.raises(PatternError, match=r"^k: expected shape \(1, 1, 60, 64\) as the lists are laid out"):
        slices.rest(q, k[:, :, 1:], v, lists)
