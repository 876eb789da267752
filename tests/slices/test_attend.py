"""Attention by slice lists: against float64, against dense attention, and its parts put together."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.gpu import TRITON_DEVICE
from helpers.slices import DTYPES, LSE_TOLERANCE, check_attention, expected, mask_of, qkv, tokens
from helpers.threads import threads
from tilewright import reference, slices
from tilewright.devices.cpu import workers
from tilewright.slices.cpu import executor as cpu_slices
from tilewright.slices.cuda.executor import Executor
from tilewright.slices.cuda.forms import SliceConfig
from tilewright.slices.layout import STEP

# Counts on both sides of a step, none, one, and all that the lists below have room for.
COUNTS = [0, 1, STEP - 1, STEP, STEP + 1, 2 * STEP]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention(head_dim, dtype, device):
    mask = mask_of([[[0, 63, 190], [150, 1, 64]], [[65, 200, 7], [128, 0, 3]]], 200).to(device)
    lists = slices.from_mask(mask, 150, rows=64)
    check_attention(lists, *qkv(2, 2, 150, 200, head_dim, dtype=dtype, device=device))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lists(data, device):
    batch, heads = data.draw(st.integers(1, 2), "B"), data.draw(st.integers(1, 2), "H")
    rows = data.draw(st.sampled_from([16, 64, 128]), "M")
    n_q, n_k = data.draw(st.integers(1, 2 * rows + 1), "N_q"), data.draw(st.integers(1, 2 * STEP + 3), "N_k")
    groups = -(-n_q // rows)
    counts = [
        [[min(n_k, data.draw(st.sampled_from(COUNTS), "count")) for _ in range(groups)] for _ in range(heads)]
        for _ in range(batch)
    ]
    lists = slices.from_mask(mask_of(counts, n_k).to(device), n_q, rows=rows)
    assert lists.counts.tolist() == counts
    q, k, v = qkv(batch, heads, n_q, n_k, 64, dtype=data.draw(st.sampled_from(DTYPES), "dtype"), device=device)
    if data.draw(st.booleans(), "contiguous"):
        q, k, v = (x.contiguous() for x in (q, k, v))
    check_attention(lists, q, k, v)


def test_all_keys_are_dense_attention(device):
    q, k, v = qkv(1, 2, 200, 130, 64, device=device)
    lists = slices.from_mask(torch.ones(1, 1, 2, 130, dtype=torch.bool, device=device), 200, heads=2)
    out, lse = slices.attend(q, k, v, lists, lse=True)
    dense, sums = slices.dense(q, k, v)
    assert reference.relative_error(out, dense) <= 2 * reference.TOLERANCE[torch.float32]
    torch.testing.assert_close(lse, sums, rtol=0, atol=LSE_TOLERANCE)
    assert lists.density().tolist() == [[1, 1]]


def test_keys_may_be_permuted_with_their_lists(device):
    q, k, v = qkv(1, 2, 130, 140, 64, device=device)
    mask = mask_of([[[70, 20], [5, 100]]], 140)
    perm = torch.randperm(140, generator=torch.Generator().manual_seed(3))
    out = slices.attend(q, k, v, slices.from_mask(mask.to(device), 130))
    permuted = slices.from_mask(mask[..., perm].to(device), 130)
    other = slices.attend(q, k[:, :, perm], v[:, :, perm], permuted)
    assert reference.relative_error(other, out) <= 2 * reference.TOLERANCE[torch.float32]


def test_parts_over_disjoint_keys_merge_to_their_union(device):
    q, k, v = qkv(1, 2, 130, 140, 64, device=device)
    mask, other = mask_of([[[70, 0], [5, 100]]], 140).to(device), mask_of([[[90, 0], [50, 0]]], 140, seed=5).to(device)
    parts = [slices.attend(q, k, v, slices.from_mask(m, 130), lse=True) for m in (mask, other & ~mask)]
    out, lse = slices.merge(*parts)
    right, sums = expected(slices.from_mask(mask | other, 130), q, k, v)
    assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[torch.float32]
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)
    assert not out[:, 0, 128:].any() and (lse[:, 0, 128:] == -torch.inf).all()


def test_merged_parts_are_of_one_shape():
    part = torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, 3)
    with pytest.raises(slices.attention.PatternError, match=r"^parts: expected attention \(1, 1, 3, 64\) and .* found"):
        slices.merge(part, (part[0], torch.zeros(1, 1, 4)))
    with pytest.raises(slices.attention.PatternError, match=r"^parts: expected at least one pair .*, found none$"):
        slices.merge()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_attention_tells_natural_log_sum_exps(dtype):
    q, k, v = qkv(2, 2, 75, 130, 64, dtype=dtype, device=TRITON_DEVICE)
    out, lse = slices.dense(q, k, v)
    scores = q.double() @ k.double().mT * 64**-0.5
    assert reference.relative_error(out, scores.softmax(-1) @ v.double()) <= reference.TOLERANCE[dtype]
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=LSE_TOLERANCE)
    assert not torch.allclose(slices.dense(q, k, v, scale=1.0)[1], lse)


def test_recall_is_the_share_of_the_listed_keys(device):
    q, k, _ = qkv(1, 2, 130, 140, 64, device=device)
    mask = mask_of([[[70, 0], [5, 140]]], 140).to(device)
    lists = slices.from_mask(mask, 130)
    weights = torch.softmax(q.double() @ k.double().mT * 64**-0.5, -1)
    kept = (weights * mask.repeat_interleave(128, 2)[:, :, :130]).sum(-1)
    found = slices.recall(q, k, lists)
    torch.testing.assert_close(found.double(), kept, rtol=0, atol=1e-5)
    assert torch.equal(found, slices.recall(q, k, lists, lse=slices.dense(q, k, k)[1]))


def test_the_result_is_written_to_given_memory(device):
    q, k, v = qkv(1, 2, 130, 140, 64, device=device)
    lists = slices.from_mask(mask_of([[[70, 0], [5, 140]]], 140).to(device), 130)
    out = tokens(1, 2, 130, 64, device=device)
    assert slices.attend(q, k, v, lists, out=out) is out
    assert torch.equal(out, slices.attend(q, k, v, lists))
    found, lse = slices.attend(q, k, v, lists, out=out.zero_(), lse=True)
    assert found is out and torch.equal(out, slices.attend(q, k, v, lists)) and lse.shape == (1, 2, 130)


def test_scores_have_the_scale_that_is_given(device):
    q, k, v = qkv(1, 1, 20, 70, 64, device=device)
    lists = slices.from_mask(mask_of([[[65]]], 70).to(device), 20)
    found = slices.attend(q * 64**-0.5, k, v, lists, scale=1.0)
    assert reference.relative_error(found, slices.attend(q, k, v, lists)) <= 2 * reference.TOLERANCE[torch.float32]


@pytest.mark.parametrize("width", [16, 64, 128])
def test_lists_of_whole_runs(width, device):
    n_k = 300
    mask = (mask_of([[[1, 3], [2, 0]]], -(-n_k // width))).repeat_interleave(width, -1)[..., :n_k].to(device)
    lists = slices.from_mask(mask, 130, width=width)
    assert lists.layout.width == width
    found, _ = check_attention(lists, *qkv(1, 2, 130, n_k, 64, device=device))
    single = slices.attend(*qkv(1, 2, 130, n_k, 64, device=device), slices.from_mask(mask, 130))
    assert torch.equal(found, single)


@pytest.mark.parametrize("width", [1, 16, 128])
@pytest.mark.parametrize(
    "config",
    [
        SliceConfig(64, 3, 4, ahead=True),
        SliceConfig(128, 2, 4, ahead=True),
        SliceConfig(64, 2, 8),
        SliceConfig(32, 1, 4),
    ],
    ids=str,
)
def test_every_form_of_the_kernel(config, width, triton_device):
    n_k = 333
    runs = mask_of([[[2, -(-n_k // width), 1], [0, 1, 1 + n_k // 3 // width]]], -(-n_k // width))
    lists = slices.from_mask(runs.repeat_interleave(width, -1)[..., :n_k].to(triton_device), 300, width=width)
    q, k, v = qkv(1, 2, 300, n_k, 64, dtype=torch.float16, device=triton_device)
    # Maxima that grow along the lists, a little and much, but for their end, which comes first.
    k *= torch.linspace(0.2, 3, n_k, device=k.device).roll(-n_k // 3)[:, None].to(k.dtype)
    executor = Executor(lists.layout, q.device, config)
    out, lse = executor.attend(lists.tensors, q, k, v, scale=64**-0.5, with_lse=True)
    right, sums = expected(lists, q, k, v)
    assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[torch.float16]
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bound_of_the_scores_changes_nothing(dtype, device):
    q, k, v = (
        torch.nn.functional.normalize(x, dim=-1) * 4 for x in qkv(1, 2, 150, 200, 64, dtype=dtype, device=device)
    )
    lists = slices.from_mask(mask_of([[[0, 63, 190], [150, 1, 64]]], 200).to(device), 150, rows=64)
    out, lse = slices.attend(q, k, v, lists, lse=True, bound=4 * 4 / 8)
    right, sums = expected(lists, q, k, v)
    assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[dtype]
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)
    with pytest.raises(slices.attention.PatternError, match=r"^bound: expected a finite number, found nan$"):
        slices.attend(q, k, v, lists, bound=torch.nan)


def test_a_kernel_with_a_bound_has_no_maximum(triton_device):
    """Scores beyond what was promised show: with a maximum they would not."""
    q, k, v = qkv(1, 1, 16, 70, 64, device=triton_device)
    lists = slices.from_mask(mask_of([[[65]]], 70).to(triton_device), 16, rows=16)
    assert slices.attend(q * 8, k * 8, v, lists, bound=-1e4).isnan().all()


def test_groups_are_shared_among_the_cores(monkeypatch):
    """Operators of a worker compute on one core, but there are as many workers as torch has threads."""
    made = []
    monkeypatch.setattr(cpu_slices, "workers", lambda n: made.append(n) or workers.workers(n))
    q, k, v = qkv(1, 2, 300, 300, 64)
    lists = slices.from_mask(torch.ones(1, 1, 3, 300, dtype=torch.bool), queries=300, heads=2)
    with threads(3):
        slices.attend(q, k, v, lists)
        assert made == [3] and torch.get_num_threads() == 3
