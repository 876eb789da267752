"""Joint attention: tokens of text before or behind those of a video, as in CogVideoX and HunyuanVideo, some of them
padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import library

from helpers import selection as oracle
from helpers.cases import rest_slow
from helpers.gpu import TRITON_DEVICE
from helpers.slices import DTYPES, LSE_TOLERANCE, check_attention, qkv, tokens
from tilewright import reference, slices
from tilewright.core.errors import ConfigError, DeviceError, PatternError
from tilewright.slices import prediction

ops = torch.ops.tilewright
# Where text stands: before the video's tokens, behind them, on both sides.
TEXTS = [(21, 0), (0, 30), (5, 7)]
SCALE = 64**-0.5


@pytest.fixture
def device(request, device, monkeypatch):
    """Where the executor of a test runs, with what chooses keys there."""
    kind = request.node.callspec.params["device"]
    monkeypatch.setitem(prediction.SELECTIONS, device.type, f"tilewright.slices.{kind}.selection")
    for cache in (prediction._selection, prediction._memory):
        cache.cache_clear()
    yield device
    for cache in (prediction._selection, prediction._memory):
        cache.cache_clear()


def seen(lists):
    """bool [B, H, N_q, N_k]: the pairs that lists and their text stand for, entry by entry."""
    layout = lists.layout
    found = torch.zeros(layout.batch, layout.heads, layout.tokens, layout.keys, dtype=torch.bool)
    for b, h, g in np.ndindex(*lists.counts.shape):
        first = layout.first + g * layout.rows
        keys = lists.keys[b, h, g, : lists.counts[b, h, g]].long().cpu()
        found[b, h, first : min(first + layout.rows, layout.first + layout.queries), keys] = True
    for text in layout.text:
        for b in range(layout.batch):
            found[b, :, text, : layout.keys if lists.lengths is None else int(lists.lengths[b])] = True
    return found


def masked(q, k, v, mask):
    """Attention over the pairs of a mask and its log-sum-exps, in float64."""
    q, k, v = (x.detach().cpu().double() for x in (q, k, v))
    scores = (q @ k.mT * SCALE).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check_joint(lists, q, k, v):
    """Compare attention by lists with that over the pairs that they stand for."""
    mask = seen(lists)
    out, lse = slices.attend(q, k, v, lists, lse=True)
    right, sums = masked(q, k, v, mask)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[q.dtype]
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)
    torch.testing.assert_close(lists.density().cpu(), mask.float().mean((2, 3)))
    for b, h in np.ndindex(*lists.counts.shape[:2]):
        assert np.array_equal(lists.graph(b, h).to_dense(), mask[b, h].numpy())
    return mask


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_joint_attention_is_softmax_over_the_lists_and_all_keys_of_text(data, device):
    rows = data.draw(st.sampled_from([16, 32]), "M")
    first, last = data.draw(st.integers(0, 40), "first"), data.draw(st.integers(0, 40), "last")
    video, batch = data.draw(st.integers(1, 2 * rows + 3), "video"), data.draw(st.integers(1, 2), "B")
    n = first + video + last
    lengths = None
    if data.draw(st.booleans(), "padded"):
        lengths = torch.tensor([data.draw(st.integers(1, n), "length") for _ in range(batch)], device=device)
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    q, k, v = qkv(batch, 2, n, n, 64, dtype=dtype, device=device)
    how = {"by": "pooled", "pool": 8, data.draw(st.sampled_from(["mass", "keep"]), "how"): 0.5}
    width = data.draw(st.sampled_from([1, 1, 16]), "width")
    lists = slices.predict(q, k, budget=1, rows=rows, width=width, text=(first, last), lengths=lengths, least=3, **how)
    mask = check_joint(lists, q, k, v)
    lists.check()
    # All that is not padding of text is seen by all, and no padding by any.
    for b in range(batch):
        length = n if lengths is None else int(lengths[b])
        key = torch.arange(n)
        text = ((key < first) | (key >= n - last)) & (key < length)
        assert mask[b][..., text].all() and not mask[b][..., length:].any()


@pytest.mark.parametrize(
    ("width", "by"), rest_slow([(1, "pooled"), (16, "column"), (16, "pooled"), (1, "column")], 0, 1)
)
def test_padding_is_as_if_it_were_not_there(width, by, device):
    """The lists of an entry are those of the entry alone without its padding."""
    q, k, _ = qkv(3, 2, 150, 150, 64, device=device)
    lengths = [150, 101, 129]
    how = {"rows": 32, "width": width, "by": by, "mass": 0.5, "budget": 1, "least": 3}
    # What pads must not matter, whatever it is.
    for b, n in enumerate(lengths):
        k[b, :, n:] *= 20
    lists = slices.predict(q, k, text=(0, 50), lengths=torch.tensor(lengths, device=device), **how)
    assert lists.density().min() > 0.1 and lists.density().max() < 0.95
    for b, n in enumerate(lengths):
        queries = q[b : b + 1, :, :n]
        alone = slices.predict(queries, k[b : b + 1, :, :n], text=(0, n - 100), **how)
        assert torch.equal(alone.counts[0], lists.counts[b])
        for h, g in np.ndindex(*alone.counts.shape[1:]):
            count = alone.counts[0, h, g]
            assert torch.equal(alone.keys[0, h, g, :count], lists.keys[b, h, g, :count])


@pytest.mark.parametrize("text", TEXTS)
def test_all_keys_are_dense_attention(text, device):
    q, k, v = qkv(2, 2, 120, 120, 64, device=device)
    lists = slices.predict(q, k, keep=1.0, budget=1, rows=32, text=text)
    out, lse = slices.attend(q, k, v, lists, lse=True)
    dense, sums = slices.dense(q, k, v)
    assert reference.relative_error(out, dense) <= 2 * reference.TOLERANCE[torch.float32]
    torch.testing.assert_close(lse, sums, rtol=0, atol=LSE_TOLERANCE)
    assert (lists.density() == 1).all()
    assert torch.allclose(slices.recall(q, k, lists), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("text", TEXTS)
def test_predictors_average_no_text(text, device):
    """Groups begin with the first token of the video: its shares are those of its own queries."""
    q, k, _ = qkv(1, 2, 120, 120, 64, device=device)
    first, last = text
    q[:, :, :first] *= 50
    q[:, :, 120 - last :] *= 50
    lists = slices.predict(q, k, threshold=0.02, budget=1, rows=32, pool=8, text=text, least=0)
    shares = oracle.pooled(q[:, :, first : 120 - last], k, 32, 8, SCALE)
    of_text = np.r_[0:first, 120 - last : 120]
    for place in np.ndindex(*lists.counts.shape):
        keys = lists.keys[place][: lists.counts[place]].tolist()
        assert set(of_text) <= set(keys)
        assert set(np.flatnonzero(shares[place] >= 0.02 * 1.001)) <= set(keys)
        others = np.setdiff1d(keys, of_text)
        assert shares[place][others].min(initial=1) >= 0.02 * 2 ** (-1 / 8) * 0.999


def test_blocks_of_keys_hold_no_text(device):
    q, k, v = qkv(1, 2, 150, 150, 64, device=device)
    text = (21, 9)
    how = {"by": "blocks", "block": 16, "similarity": -1.0, "rows": 32, "mass": 0.5, "budget": 1, "least": 3}
    lists = slices.predict(q, k, text=text, **how)
    check_joint(lists, q, k, v)
    # Those of the video alone, and the text.
    alone = slices.predict(q[:, :, 21:141], k[:, :, 21:141], **how)
    assert torch.equal(lists.counts, alone.counts + 30)
    for place in np.ndindex(*lists.counts.shape):
        keys = lists.keys[place][21 : lists.counts[place] - 9] - 21
        assert torch.equal(keys, alone.keys[place][: alone.counts[place]])


def test_text_counts_towards_the_budget(device):
    q, k, _ = qkv(1, 2, 300, 300, 64, device=device)
    lists = slices.predict(q, k, keep=0.4, budget=0.4, rows=32, text=(100, 0))
    assert lists.layout.capacity == 128 and (lists.counts == 120).all()
    with pytest.raises(
        ConfigError,
        match=r"^budget: expected room for the 100 keys of always and text, found 64; a budget of 0\.334 holds",
    ):
        slices.predict(q, k, mass=1.0, budget=0.2, rows=32, text=(100, 0))


@pytest.mark.parametrize("text", TEXTS)
def test_lists_of_ones_own(text, device):
    q, k, v = qkv(1, 2, 120, 120, 64, device=device)
    first, last = text
    stated = {"rows": 32, "text": text}

    def near(b, h, query, key):
        return (query - key).abs() <= 9 + h

    lists = slices.from_mask_mod(near, (120, 120), heads=2, device=device, **stated)
    mask = check_joint(lists, q, k, v)
    queries = torch.arange(first, min(first + 32, 120 - last))
    right = ((queries[:, None] - torch.arange(120)).abs() <= 10).any(0)
    assert torch.equal(mask[0, 1, first], right)
    assert torch.equal(seen(slices.from_mask(lists_mask(lists), 120, **stated)), mask)
    again = slices.from_indices(lists.keys, lists.counts, (120, 120), check=True, **stated)
    assert torch.equal(seen(again), mask)
    predicted = slices.predict(q, k, by="given", mask=near, budget=1, rows=32, text=text)
    assert torch.equal(seen(predicted), mask | text_keys(120, text))


def text_keys(n, text):
    key = torch.arange(n)
    return (key < text[0]) | (key >= n - text[1])


def lists_mask(lists):
    """bool [B, H, G, N_k] of the groups' keys."""
    mask = torch.zeros(*lists.counts.shape, lists.layout.keys, dtype=torch.bool, device=lists.keys.device)
    for place in np.ndindex(*lists.counts.shape):
        mask[place][lists.keys[place][: lists.counts[place]].long()] = True
    return mask


def test_a_pattern_of_the_grid_goes_with_text(device):
    q, k, v = qkv(1, 1, 110, 110, 64, device=device)
    stated = {"by": "given", "pattern": "spatial", "grid": (4, 5, 5), "reach": 0, "budget": 1, "rows": 16}
    mask = check_joint(slices.predict(q, k, text=(10, 0), **stated), q, k, v)
    # The first group, of 16 tokens of the first frame.
    assert mask[0, 0, 10].nonzero().flatten().tolist() == list(range(35))
    with pytest.raises(ConfigError, match=r"^grid: expected 110 queries and 110 keys, found 4x5x5 and 9 of text, 109"):
        slices.predict(q, k, text=(9, 0), **stated)


@pytest.mark.parametrize("lse", [False, True])
def test_the_result_is_written_to_given_memory(lse, device):
    q, k, v = qkv(1, 2, 120, 120, 64, device=device)
    lists = slices.predict(q, k, keep=0.5, budget=0.6, rows=32, text=(21, 8))
    expected = slices.attend(q, k, v, lists, lse=lse)
    out = tokens(1, 2, 120, 64, device=device)
    found = slices.attend(q, k, v, lists, lse=lse, out=out)
    assert (found[0] if lse else found) is out
    assert torch.equal(out, expected[0] if lse else expected)


def test_recall_leaves_padding_out(device):
    q, k, _ = qkv(2, 2, 120, 120, 64, device=device)
    lengths = torch.tensor([120, 95], device=device)
    lists = slices.predict(q, k, keep=0.5, budget=0.8, rows=32, text=(0, 30), lengths=lengths)
    weights = masked(q, k, k, torch.arange(120) < lengths.cpu()[:, None, None, None])[1]
    kept = masked(q, k, k, seen(lists))[1]
    torch.testing.assert_close(slices.recall(q, k, lists).cpu().double(), (kept - weights).exp(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_attention_leaves_padding_out(dtype):
    q, k, v = qkv(2, 2, 75, 130, 64, dtype=dtype, device=TRITON_DEVICE)
    lengths = torch.tensor([130, 77], device=TRITON_DEVICE)
    out, lse = slices.dense(q, k, v, lengths=lengths)
    right, sums = masked(q, k, v, torch.arange(130) < lengths.cpu()[:, None, None, None])
    assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[dtype]
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("packed", rest_slow([True, False], 0))
def test_lists_of_joint_attention_are_kept_across_steps(packed, device):
    q, k, v = qkv(2, 2, 120, 120, 64, device=device)
    lengths = torch.tensor([120, 95], device=device)
    stated = {"keep": 0.5, "budget": 0.8, "rows": 32, "text": (0, 30)}
    steps = slices.Steps(refresh=(1,), first_dense=1, packed=packed, **stated)
    dense, _ = slices.dense(q, k, v, lengths=lengths)
    assert torch.equal(steps(0, 0, 0, q, k, v, lengths), dense)
    expected = slices.attend(q, k, v, slices.predict(q, k, lengths=lengths, **stated))
    assert torch.equal(steps(0, 1, 0, q, k, v, lengths), expected)
    # At a later step they are as they were.
    assert torch.equal(seen(steps.lists(0, 2, 0)), seen(slices.predict(q, k, lengths=lengths, **stated)))
    check_joint(steps.lists(0, 2, 0), *qkv(2, 2, 120, 120, 64, seed=9, device=device))


@pytest.mark.parametrize("lengths", [[120, 0], [120, -3], [120, 121]])
def test_lengths_out_of_range_make_all_nan_and_are_told(lengths, device):
    q, k, v = qkv(2, 2, 120, 120, 64, device=device)
    lists = slices.predict(
        q, k, keep=0.5, budget=0.8, rows=32, text=(0, 30), lengths=torch.tensor(lengths, device=device)
    )
    assert slices.attend(q, k, v, lists).isnan().all()
    with pytest.raises(
        PatternError, match=r"^lengths: expected 1 to 120 first keys, .*, found others for batch entry 1$"
    ):
        lists.check()


@pytest.mark.parametrize("backend", rest_slow(["eager", "aot_eager"], 0))
def test_compiled_as_one_graph(backend, device):
    q, k, v = qkv(2, 2, 120, 120, 64, device=device)
    lengths = torch.tensor([120, 95], device=device)

    def network(q, k, v, lengths):
        lists = slices.predict(q, k, mass=0.8, budget=0.8, rows=32, pool=4, text=(3, 30), lengths=lengths)
        return slices.attend(q, k, v, lists, lse=True)

    with torch.no_grad():
        found = torch.compile(network, fullgraph=True, backend=backend)(q, k, v, lengths)
        for one, other in zip(found, network(q, k, v, lengths), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("stated", "error", "message"),
    [
        ({"text": (20, 20)}, PatternError, "^text: expected .* some of 40 queries and 40 keys, found 20 and 20$"),
        ({"text": (-1, 0)}, PatternError, r"^text: expected 2 integers of at least 0, found \(-1, 0\)$"),
        ({"lengths": torch.ones(2, dtype=torch.int32)}, PatternError, r"^lengths: .* of shape \(1,\), found .*\(2,\)$"),
        ({"lengths": torch.ones(1)}, PatternError, "^lengths: expected int32 or int64 .*, found torch.float32"),
        (
            {"lengths": torch.ones(1, dtype=torch.int32, device="meta")},
            DeviceError,
            "^lengths: expected a tensor on cpu, as q, found meta$",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(stated, error, message):
    q, k, _ = qkv(1, 1, 40, 40, 64)
    with pytest.raises(error, match=message):
        slices.predict(q, k, mass=0.5, budget=1, rows=16, **stated)


def test_tokens_are_those_of_the_lists(device):
    q, k, v = qkv(1, 2, 120, 120, 64, device=device)
    lists = slices.predict(q, k, keep=0.5, budget=0.8, rows=32, text=(0, 30))
    shape = r"expected shape \(1, 2, 120, D\) as the lists are laid out, found \(1, 2, 90, 64\)$"
    with pytest.raises(PatternError, match="^q: " + shape):
        slices.attend(q[:, :, :90], k, v, lists)
    with pytest.raises(PatternError, match="^out: " + shape):
        slices.attend(q, k, v, lists, out=torch.empty_like(q[:, :, :90]))


def test_without_text_lengths_are_of_lists_alone(device):
    q, k, v = qkv(2, 2, 120, 120, 64, device=device)
    lists = slices.predict(q, k, keep=0.9, budget=1, rows=32, lengths=torch.tensor([64, 120], device=device))
    check_attention(replace(lists, lengths=None), q, k, v)
    assert (lists.counts[0] == 64).all() and (lists.counts[1] == 108).all()


def test_the_operators_are_well_formed(device):
    q, k, v = qkv(2, 1, 40, 40, 64, device=device)
    lengths, layout = (
        torch.tensor([40, 30], dtype=torch.int32, device=device),
        slices.make_layout(2, 1, 40, 40, text=(3, 4)),
    )
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    library.opcheck(ops.slices_dense.default, (q, k, v, lengths, SCALE, []), **checks)
    given = q, k, None, None, lengths, "pooled", "", 0.8, None, None, [0, 3, 36, 40], None, SCALE, list(layout)
    library.opcheck(ops.slices_predict.default, given, **checks)
