import ctypes
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import plans
from tilewright import graph, reference
from tilewright.attention import masks
from tilewright.attention.cpu import executor as cpu_executor
from tilewright.attention.cpu import launch as cpu_launch
from tilewright.attention.masks import Bias
from tilewright.core.errors import ArtifactError, DeviceError, PatternError
from tilewright.devices.cpu import workers as cpu_workers

H, D = 2, 16


def tokens(n_q, n_k, batch=1, dtype=torch.float32, heads=H, head_dim=D):
    generator = torch.Generator().manual_seed(0)
    sizes = (n_q, n_k, n_k)
    return [torch.randn(batch, heads, n, head_dim, generator=generator).to(dtype) for n in sizes]


def run(dense, names, *, batch=1, dtype=torch.float32, **options):
    """``(executor's result, reference)`` of a random order and schedule."""
    call, inputs, expected = plans.prepared(
        cpu_executor.prepare, dense, names, tokens(*dense.shape, batch, dtype), **options
    )
    return call(*inputs), expected


def assert_close(result, expected, dtype=torch.float32):
    assert result.dtype == dtype and result.shape == expected.shape
    assert not result.isnan().any()
    assert reference.relative_error(result, expected) <= reference.TOLERANCE[dtype]


# An oracle must not be taken at its word, either.
def test_the_reference_is_softmax_written_out():
    q, k, v = tokens(3, 5)
    allowed = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    out = reference.attention(q, k, v, allowed)
    for i in (0, 2):
        keys = allowed[i].nonzero().ravel()
        scores = [(q[0, 1, i] @ k[0, 1, j]).item() * D**-0.5 for j in keys]
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(
            out[0, 1, i], sum(w * v[0, 1, j] for w, j in zip(weights, keys, strict=True)), atol=1e-6
        )
    assert (out[:, :, 1] == 0).all()


@pytest.mark.parametrize("slab", [1, 1 << 25], ids=["row-by-row", "at-once"])
def test_rows_of_a_large_graph_are_rows_of_the_reference(monkeypatch, slab):
    monkeypatch.setattr(reference, "_SLAB_SCORES", {"cpu": slab})
    monkeypatch.setattr(reference, "_SLAB_ROWS", 3)
    dense = plans.pattern(70, 50, empty=3)
    pattern = graph.from_pattern(dense)
    q, k, v = tokens(70, 50, batch=2)
    bias = torch.randn(H, 70, 50, generator=torch.Generator().manual_seed(1))
    rows = np.r_[[3, 69, 12, 0], np.flatnonzero(~dense.any(1))]
    for added in (None, bias):
        whole = reference.attention(q, k, v, torch.from_numpy(dense), bias=added)[:, :, rows]
        taken = None if added is None else lambda rows, keys: bias[:, rows][:, :, keys]
        torch.testing.assert_close(reference.attention_rows(pattern, rows, q, k, v, bias=taken), whole)
    whole = reference.attention(q, k, v, torch.ones(1, 1, dtype=torch.bool))[:, :, rows]
    torch.testing.assert_close(reference.dense_rows(rows, q, k, v), whole)


@pytest.mark.parametrize(("n_rows", "every"), [(1, 1), (1024, 1), (4097, 4), (16385, 8), (65537, 8), (1 << 22, 512)])
def test_a_sample_grows_with_the_rows(n_rows, every):
    assert reference.stride(n_rows) == every


def test_a_sample_holds_a_row_of_every_few_and_those_of_most_and_fewest_keys():
    pattern = graph.from_pattern(plans.pattern(205, 50))
    rows = reference.sample_rows(pattern, 8, seed=0)
    assert {pattern.row_degree.argmax(), pattern.row_degree.argmin()} <= set(rows) and 26 <= len(rows) <= 28
    assert set(rows // 8) == set(range(26))
    assert np.array_equal(reference.sample_rows(pattern, 1, seed=0), np.arange(205))


def chance_of_a_miss(every, wrong):
    """Chance that `reference.sample_rows` holds none of `wrong` neighbouring rows, which begin anywhere.

    One of 8: 7/8 for a single row, 16 % for 8 rows, and none for 15 rows or more, such as a block of 16 or 64.
    """
    begin = np.arange(every)[:, None]
    edges = np.arange(0, every + wrong, every)
    inside = np.minimum(begin + wrong, edges + every) - np.maximum(begin, edges)
    return float((1 - inside.clip(0) / every).prod(1).mean())


@pytest.mark.parametrize("wrong", [1, 5, 8, 14, 15, 16, 64])
def test_a_sample_misses_no_more_wrong_rows_than_it_says(wrong):
    pattern = graph.from_pattern(np.ones((800, 1), bool))
    seen = np.zeros((100, 800), bool)
    for seed, held in enumerate(seen):
        held[reference.sample_rows(pattern, 8, seed)] = True
    # The first row is in every sample, as that of most keys: places far from it are looked at.
    sums = np.cumsum(seen, axis=1)[:, 100:]
    missed = float((sums[:, wrong:] == sums[:, :-wrong]).mean())
    chance = chance_of_a_miss(8, wrong)
    assert missed == pytest.approx(chance, abs=0.02) and (chance == 0) == (missed == 0) == (wrong >= 15)


# What the check of a row must see, in numbers: of attention at 65,537 keys as well, where a row is 0.006 long a value.

FEW, MANY = 4, 65_537


def rounded(out, dtype, seed=0):
    """What a right executor makes of rows [R, D]: off by the type's rounding."""
    generator = torch.Generator().manual_seed(seed)
    noise = 2 * torch.rand(out.shape, generator=generator, dtype=torch.float64) - 1
    return (out * (1 + torch.finfo(dtype).eps / 2 * noise)).to(dtype)


def attended(q, k, v, allowed=None, scale=D**-0.5, bias=0.0):
    """Rows [R, D] in float64; allowed: bool [R or 1, N] or None."""
    scores = q @ k.T * scale + bias
    return torch.softmax(scores if allowed is None else scores.masked_fill(~allowed, -torch.inf), -1) @ v


def replaced(out, rows, by):
    out = out.clone()
    out[rows] = by[rows]
    return out


def without(share):
    def fault(q, k, v, out):
        chosen = torch.rand(len(k), generator=torch.Generator().manual_seed(3))
        return attended(q, k, v, (chosen >= share)[None])

    return fault


ALWAYS = {
    "zeros": lambda q, k, v, out: torch.zeros_like(out),
    "mean": lambda q, k, v, out: v.mean(0).expand_as(out),
    "scale": lambda q, k, v, out: attended(q, k, v, scale=1.05 * D**-0.5),
    "bias": lambda q, k, v, out: attended(
        q, k, v, bias=torch.randn(len(k), generator=torch.Generator().manual_seed(2))
    ),
    "shifted": lambda q, k, v, out: attended(q, k.roll(1, 0), v),
    "one-row": lambda q, k, v, out: replaced(out, [7], out.roll(1, 0)),
    "rows": lambda q, k, v, out: replaced(out, range(64), out.roll(64, 0)),
    "not-written": lambda q, k, v, out: replaced(out, [127], out * torch.nan),
}
DROPPED = {
    "one-percent": without(0.01),
    "run": lambda q, k, v, out: attended(q, k, v, torch.arange(len(k))[None] >= max(1, len(k) // 100)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_keys", [FEW, 484, MANY])
def test_a_fault_is_larger_than_the_tolerance_and_rounding_is_not(n_keys, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, D, generator=generator).to(dtype).double() for n in (128, n_keys, n_keys))
    out, tolerance = attended(q, k, v), reference.TOLERANCE[dtype]
    assert reference.relative_error(rounded(out, dtype), out) <= tolerance
    for name, fault in (ALWAYS | (DROPPED if n_keys > FEW else {})).items():
        assert not reference.relative_error(rounded(fault(q, k, v, out), dtype), out) <= tolerance, name
    # One key of 484 is lost.
    if n_keys <= 484:
        lost = attended(q, k, v, torch.arange(n_keys)[None] > 0)
        assert not reference.relative_error(rounded(lost, dtype), out) <= tolerance


def test_rows_without_keys_are_exactly_zero():
    right = torch.zeros(2, 3, dtype=torch.float64)
    assert reference.relative_error(torch.zeros(2, 3), right) == 0
    assert reference.relative_error(torch.tensor([[0.0, 0, 0], [0, 1e-30, 0]]), right) == np.inf


SHAPES = [(64, 64), (97, 61), (33, 200), (1, 1), (1, 90), (130, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-{s[1]}")
@pytest.mark.parametrize("split_keys", [None, 32], ids=["whole", "split"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "natural"])
def test_executor_equals_the_reference(shape, split_keys, ordered):
    names = ["1x1"] if min(shape) == 1 else ["16x1", "8x8", "32x16"]
    dense = plans.pattern(*shape, n_global=1, empty=min(1, shape[0] - 1))
    assert_close(*run(dense, names, split_keys=split_keys, ordered=ordered, batch=2))


@settings(max_examples=25, deadline=None)
@given(
    n_q=st.integers(17, 90),
    n_k=st.integers(17, 90),
    density=st.sampled_from([0.02, 0.3, 0.95]),
    names=st.lists(st.sampled_from(["1x1", "4x1", "16x1", "16x8", "8x16"]), min_size=1, max_size=3, unique=True),
    split_keys=st.sampled_from([None, 16, 48]),
    batch=st.integers(1, 3),
    ordered=st.booleans(),
    bias=st.booleans(),
    empty=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_any_schedule_equals_the_reference(n_q, n_k, density, names, split_keys, batch, ordered, bias, empty, seed):
    dense = plans.pattern(n_q, n_k, density, seed, n_global=2, empty=empty)
    extra = torch.randn(H, n_q, n_k) if bias else None
    assert_close(*run(dense, names, split_keys=split_keys, batch=batch, ordered=ordered, bias=extra, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_16_bit_types(dtype, bias):
    extra = torch.randn(H, 80, 70) if bias else None
    assert_close(*run(plans.pattern(80, 70), ["16x1", "16x16"], split_keys=32, dtype=dtype, bias=extra), dtype)


@pytest.mark.parametrize("kept", [1 << 28, 0], ids=["spelt-out-before", "spelt-out-in-the-call"])
@pytest.mark.parametrize("bias", [False, True], ids=["bits", "bias"])
def test_masks_that_do_not_fit_are_spelt_out_in_the_call(monkeypatch, kept, bias):
    monkeypatch.setattr(cpu_executor, "MASK_BYTES", kept)
    extra = torch.randn(H, 80, 70) if bias else None
    assert_close(*run(plans.pattern(80, 70), ["16x1"], split_keys=32, bias=extra, batch=2))


def test_bias_from_a_table_in_natural_token_order():
    def index(rows, cols):
        return (np.asarray(rows) - cols) % 13

    for ordered in (True, False):
        bias = Bias(torch.randn(H, 13), index)
        assert_close(*run(plans.pattern(80, 70), ["16x1", "8x8"], bias=bias, ordered=ordered, split_keys=32))


def test_equal_masks_are_held_once():
    dense = np.kron(np.eye(8, dtype=bool), np.tril(np.ones((16, 16), bool)))
    cover = plans.covers(graph.from_pattern(dense), ["16x1"], region_rows=16)
    call = cpu_executor.prepare(plans.scheduled(cover, rounds=1), cover, heads=H, head_dim=D, dtype=torch.float32)
    assert [launch.masks.size for launch in call.launches] == [1]
    bias = Bias(torch.zeros(H, 31), lambda rows, cols: rows - cols + 15)
    call = cpu_executor.prepare(
        plans.scheduled(cover, rounds=1), cover, heads=H, head_dim=D, dtype=torch.float32, bias=bias
    )
    assert [launch.masks.size for launch in call.launches] == [1]


def test_keys_that_items_share_are_gathered_once():
    dense = np.zeros((64, 64), bool)
    dense[:, :20] = True
    cover = plans.covers(graph.from_pattern(dense), ["16x1"], region_rows=16)
    call = cpu_executor.prepare(plans.scheduled(cover, rounds=1), cover, heads=H, head_dim=D, dtype=torch.float32)
    chunks = [chunk for launch in call.launches for chunk in launch.chunks]
    assert sum(chunk.items for chunk in chunks) == 4 and all(chunk.shared for chunk in chunks)
    q, k, v = tokens(64, 64, batch=2)
    assert_close(call(q, k, v), reference.attention(q, k, v, torch.from_numpy(dense)))


@pytest.mark.parametrize(("l2_bytes", "together"), [(1 << 12, {False}), (1 << 14, {False, True}), (1 << 20, {True})])
def test_a_chunk_is_cut_to_the_caches_and_large_items_are_handed_to_workers(monkeypatch, l2_bytes, together):
    tiny = cpu_launch.devices.describe("cpu") | {"l2_bytes": l2_bytes, "threads": 2}
    monkeypatch.setattr(cpu_launch.devices, "describe", lambda kind: tiny)
    inputs = tokens(97, 61, batch=3)
    call, inputs, expected = plans.prepared(cpu_executor.prepare, plans.pattern(97, 61, n_global=2), ["8x1"], inputs)
    assert {launch.together for launch in call.launches} == together
    assert_close(call(*inputs), expected)


@pytest.mark.parametrize("names", [["16x1"], ["16x8"]], ids=lambda names: names[0])
@pytest.mark.parametrize("split_keys", [None, 64], ids=["whole", "split"])
def test_runs_that_only_pad_an_item_count_for_nothing(names, split_keys):
    # More lengths than an item can be padded to.
    dense = np.tril(np.ones((200, 200), bool))
    cover = plans.covers(graph.from_pattern(dense), names)
    call = cpu_executor.prepare(
        plans.scheduled(cover, split_keys), cover, heads=H, head_dim=D, dtype=torch.float32, scale=1.0
    )
    q, k, v = tokens(200, 200)
    assert_close(call(q, k, v), reference.attention(q, k, v, torch.from_numpy(dense), scale=1.0))


def test_a_key_that_nobody_sees_does_not_leak():
    dense = plans.pattern(60, 50)
    dense[:, 0] = False
    cover = plans.covers(graph.from_pattern(dense), ["16x1"])
    call = cpu_executor.prepare(plans.scheduled(cover), cover, heads=H, head_dim=D, dtype=torch.float32)
    q, k, v = tokens(60, 50)
    k[:, :, 0] = v[:, :, 0] = torch.nan
    assert not call(q, k, v).isnan().any()


def test_scale():
    assert_close(*run(plans.pattern(60, 50), ["16x1"], scale=0.5))


@pytest.mark.parametrize("split_keys", [None, 32], ids=["whole", "split"])
def test_a_scale_of_0_weighs_all_keys_alike(split_keys):
    assert_close(*run(plans.pattern(60, 90), ["16x1"], scale=0.0, split_keys=split_keys))


def test_a_batch_of_none_gives_none():
    result, expected = run(plans.pattern(60, 50), ["16x1"], batch=0, split_keys=32)
    assert result.shape == expected.shape == (0, H, 60, D)


def padding(n_q, n_k):
    """-inf for the first 64 keys, for all but a few or all keys of some queries, and for keys of one head alone."""
    bias = torch.randn(H, n_q, n_k)
    bias[:, :, :64] = bias[:, 40:60, : n_k - 9] = bias[:, 5:20] = bias[0, 30:40] = -torch.inf
    return bias


BIASES = {
    "padding": padding,
    "constant": lambda n_q, n_k: torch.full((H, n_q, n_k), -1e6),
    "some-rows": lambda n_q, n_k: torch.where(torch.arange(n_q)[:, None] % 3 > 0, -1e6, 0.0).expand(H, n_q, n_k),
    "some-keys": lambda n_q, n_k: torch.where(torch.arange(n_k) < 64, -1e6, 0.0).expand(H, n_q, n_k),
    "large": lambda n_q, n_k: 1e6 * torch.randint(-1, 2, (H, n_q, n_k)),
}


@pytest.mark.parametrize("kept", [1 << 28, 0], ids=["spelt-out-before", "spelt-out-in-the-call"])
@pytest.mark.parametrize("split_keys", [None, 32], ids=["whole", "split"])
@pytest.mark.parametrize("bias", BIASES)
def test_biases_without_bound(monkeypatch, bias, split_keys, kept):
    monkeypatch.setattr(cpu_executor, "MASK_BYTES", kept)
    extra = BIASES[bias](80, 200).float()
    result, expected = run(plans.pattern(80, 200, 0.5), ["16x1", "8x8"], split_keys=split_keys, bias=extra, batch=2)
    assert_close(result, expected)
    if bias == "padding":
        assert not result[:, :, 5:20].any() and not result[:, 0, 30:40].any() and result[:, 1, 30:40].any(-1).all()


def test_strided_inputs():
    dense = plans.pattern(60, 60)
    cover = plans.covers(graph.from_pattern(dense), ["16x1"])
    call = cpu_executor.prepare(plans.scheduled(cover), cover, heads=H, head_dim=D, dtype=torch.float32)
    q, k, v = torch.randn(2, 60, 3, H, D).permute(2, 0, 3, 1, 4)
    assert_close(call(q, k, v), reference.attention(q, k, v, torch.from_numpy(dense)))


@pytest.fixture(scope="module")
def small():
    cover = plans.covers(graph.from_pattern(plans.pattern(40, 30)), ["16x1"])
    plan = plans.scheduled(cover)
    return plan, cover, cpu_executor.prepare(plan, cover, heads=H, head_dim=D, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:, :, 1:], k, v), r"q: expected shape \(B, 2, 40, 16\), .*found \(1, 2, 39, 16\)"),
        (lambda q, k, v: (q, k[:, :1], v), "k: expected shape"),
        (lambda q, k, v: (q, k, v[..., :8]), "v: expected shape"),
        (lambda q, k, v: (q, k, v.repeat(2, 1, 1, 1)), "v: expected shape"),
        (lambda q, k, v: (q[0], k, v), "q: expected shape"),
        (lambda q, k, v: (q.double(), k, v), "q: expected dtype torch.float32 as planned, found torch.float64"),
        (lambda q, k, v: (q, k.to("meta"), v), "k: expected a tensor on cpu as planned, found meta"),
        (lambda q, k, v: (q, k, v.requires_grad_()), "v: this operator has no backward"),
    ],
    ids=["tokens", "heads", "head-dim", "batch", "dims", "dtype", "device", "grad"],
)
def test_tensors_that_do_not_fit_are_refused(small, change, message):
    with pytest.raises(DeviceError if "found meta" in message else PatternError, match=message):
        small[2](*change(*tokens(40, 30)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_order": np.arange(39)}, "row_order: expected an order of 40"),
        ({"col_order": np.arange(31)}, "col_order: expected an order of 30"),
        ({"bias": torch.zeros(H, 40, 31)}, r"bias: expected shape \(2, 40, 30\)"),
        ({"bias": Bias(torch.zeros(3, 5), None)}, r"bias table: expected shape \(2, T\)"),
        ({"bias": Bias(torch.zeros(H, 5), lambda r, c: r + c)}, r"bias index: expected 0\.\.4"),
    ],
    ids=["row-order", "col-order", "bias-shape", "bias-heads", "bias-index"],
)
def test_options_that_do_not_fit_are_refused(small, options, message):
    plan, cover, _ = small
    with pytest.raises(PatternError, match=message):
        cpu_executor.prepare(plan, cover, heads=H, head_dim=D, dtype=torch.float32, **options)


def test_blocks_of_another_schedule_are_refused(small):
    other = plans.covers(graph.from_pattern(plans.pattern(40, 30, seed=5)), ["16x1"])
    with pytest.raises(ArtifactError, match="graph"):
        cpu_executor.prepare(small[0], other, heads=H, head_dim=D, dtype=torch.float32)


@pytest.mark.parametrize("own", [False, True], ids=["torch's threads", "own threads"])
def test_workers_take_jobs_once_and_raise_what_they_raise(own, monkeypatch):
    if own:
        monkeypatch.setattr(cpu_workers, "_parallel", None)
    inside = ctypes.CDLL(None).omp_in_parallel
    threads, seen = torch.get_num_threads(), []
    two = cpu_workers.Workers(2)
    two.run(lambda job: seen.append((job, inside() or torch.get_num_threads())), range(50))
    # One core each: inside of a loop torch starts no other.
    assert sorted(seen) == [(job, 1) for job in range(50)]
    with pytest.raises(ZeroDivisionError):
        two.run(lambda job: 1 / job, [1, 0, 2])
    # Neither this thread nor a later one computes alone for it.
    found = [torch.get_num_threads()]
    late = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert found == [threads, threads]


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda mode: mode.__name__
)
def test_any_gradient_mode(small, mode):
    q, k, v = tokens(40, 30)
    with mode():
        out = small[2](q, k, v)
    assert torch.equal(out, small[2](q, k, v))


def test_memory_is_what_is_held(small):
    held = small[2].memory_bytes
    assert held >= 4 * 40 and small[2].peak_bytes(2) > small[2].peak_bytes(1) > 3 * 30 * H * D * 4
    assert masks.ItemMasks(np.zeros((1, 8, 1), np.uint8), np.array([[0, -1]]), None, None, None).held_bytes == 16
