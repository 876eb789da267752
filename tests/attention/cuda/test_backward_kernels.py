"""Gradients of schedules on a GPU, against autograd through the reference in float64, where there is no GPU under
Triton's interpreter."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import tilewright
from helpers import extremes, plans
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.gpu import cases
from helpers.hopper import compiled
from tilewright import masks, reference
from tilewright.attention import reorder
from tilewright.attention.cuda import (
    backward,
    backward_kernels,
    bias_gradients,
    config,
    tile_lists,
)
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.masks import Bias
from tilewright.core.errors import DeviceError, PatternError

H = 2
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="plans for a GPU are made on one")
# bfloat16 is silently wrong under some releases of the interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# A gradient sums products of four rounded factors where the result sums those of two: twice its tolerance.
TOLERANCE = {dtype: 2 * error for dtype, error in reference.TOLERANCE.items()}


def tokens(n_q, n_k, head_dim, batch=1, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    made = (torch.randn(batch, H, n, head_dim, generator=make) for n in (n_q, n_k, n_k, n_q))
    return [x.to(DEVICE, dtype) for x in made]


def wanted(dense, q, k, v, grad, bias, scale):
    """Gradients of q, k and v by autograd through the reference in float64."""
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    allowed = torch.from_numpy(dense)
    if isinstance(bias, Bias):
        bias = bias.table[:, torch.from_numpy(bias.index(*np.ogrid[: dense.shape[0], : dense.shape[1]]))]
    # Rows without a key have no gradient, but NaN in autograd's softmax: their result is left out.
    has_keys = allowed.any(1)
    if bias is not None:
        has_keys &= ((bias > -torch.inf) & allowed).any(2).all(0)
    rows = None if bias is None else bias[:, has_keys]
    q_seen = leaves[0][:, :, has_keys]
    reference.attention(q_seen, *leaves[1:], allowed[has_keys], bias=rows, scale=scale).backward(
        grad.cpu().double()[:, :, has_keys]
    )
    return [x.grad for x in leaves]


def check(dense, names, *, head_dim=32, batch=1, dtype=torch.float32, bias=None, scale=None, ordered=False, **options):
    """Compare gradients of a random order and schedule with autograd's; returns the executor."""
    q, k, v, grad = tokens(*dense.shape, head_dim, batch, dtype)
    given = {"bias": bias, "scale": scale, "ordered": ordered, "region_rows": 64, "device": DEVICE, **options}
    call, inputs, _ = plans.prepared(cuda_executor.prepare, dense, names, (q, k, v), **given)
    expected = wanted(dense, q, k, v, grad, bias, scale)
    if ordered:
        common = call.source.common
        row, col = (torch.from_numpy(np.asarray(order)).long() for order in common.natural)
        grad = grad[:, :, row.to(grad.device)]
        expected = [x[:, :, order] for x, order in zip(expected, (row, col, col), strict=True)]
    out, first = call(*inputs), None
    for _ in range(2):
        # Twice: the counters of split blocks are to be as they were, and the sums have one order.
        found = backward.gradients(call, *inputs, out, grad)
        for name, x, y in zip("qkv", found, expected, strict=True):
            assert x.dtype == dtype and x.is_contiguous() and not x.isnan().any()
            error = (x.cpu().double() - y).norm() / max(y.norm(), 1e-30)
            assert error <= TOLERANCE[dtype] or (not y.any() and not x.any()), f"d{name}: {error:.2e}"
        assert first is None or all(torch.equal(x, y) for x, y in zip(first, found, strict=True))
        first = found
    return call


@pytest.mark.parametrize("names, dtype", cases([["16x1"], ["64x64", "16x1"], ["128x1"]], DTYPES), ids=str)
def test_gradients_are_those_of_the_reference(names, dtype):
    check(plans.pattern(100, 90), names, dtype=dtype)


@pytest.mark.parametrize("head_dim, dtype", cases([8, 40, 48, 64, 128], DTYPES), ids=str)
def test_head_dims(head_dim, dtype):
    check(plans.pattern(70, 90), ["16x1", "32x1"], head_dim=head_dim, dtype=dtype, split_keys=32)


@pytest.mark.parametrize("n_global, head_dim", cases([1, 9], [32, 48]))
def test_rows_and_columns_of_many_keys_are_split(n_global, head_dim, monkeypatch):
    monkeypatch.setattr(backward.backward_lists.facts, "SPLIT_KEYS", 32)
    dense = plans.pattern(170, 180, 0.1, n_global=n_global)
    dense[:, :n_global] |= dense.any(1, keepdims=True)
    call = check(dense, ["16x1"], head_dim=head_dim)
    assert all(max(launch.lists.groups for launch in half) > 0 for half in call.backward.launches.values())


def test_global_tokens_have_small_tiles_and_few_full_steps_masks():
    ordered, _ = reorder.apply(masks.build("vil-tiny-224-s1-exact"), "window")
    small, large = sorted(backward.backward_lists.build(ordered, lambda tile: 64), key=lambda each: each[0].rows)
    assert (small[0].rows, set(small[1].items[:, tile_lists.Item.ROWS])) == (16, {1}) and small[1].full
    assert (large[0].rows, large[1].full, large[1].rank) == (64, False, 16)


def test_keys_have_32_queries_a_step_where_that_compiles_well():
    def step_keys(rows, head_dim, dtype=torch.bfloat16):
        return tuple(config.for_backward(rows, head_dim, dtype, narrow).step_keys for narrow in (True, False))

    assert step_keys(64, 64) == (32, 64) and step_keys(16, 64) == (64, 64)
    assert len(set(step_keys(64, 128))) == len(set(step_keys(64, 64, torch.float32))) == 1


@pytest.mark.parametrize("kind, expected", [("rectangles", 32), ("random", 64), ("both", 64)])
def test_launches_of_keys_have_the_form_of_their_masks(kind, expected):
    at, rng = np.arange(160), np.random.default_rng(0)
    dense = {
        "rectangles": np.abs(at[:, None] // 8 - at // 8) <= 2,
        "random": rng.random((160, 160)) < 0.5,
        "both": np.abs(at[:, None] // 64 - at // 64) <= 1,
    }[kind]
    if kind == "both":
        # Most steps are full, a few are not.
        dense[::7, 150:] ^= True
    call = check(dense, ["64x1"], dtype=torch.float16, seed=None)
    found = [launch for launch in call.backward.launches["keys"] if launch.lists.rows == 64]
    assert found and {launch.form.step_keys for launch in found} == {expected}
    assert all(backward.narrow(launch.lists) == (expected == 32) for launch in found)


@pytest.mark.parametrize("ordered", [False, True], ids=["natural", "ordered"])
def test_batches(ordered):
    check(plans.pattern(70, 70), ["16x1", "16x16"], batch=3, ordered=ordered, split_keys=32)


@pytest.mark.parametrize("kind, dtype", cases(["rectangles", "band", "random"], DTYPES), ids=str)
def test_masks_of_each_form(kind, dtype):
    at, rng = np.arange(160), np.random.default_rng(0)
    dense = {
        "rectangles": np.abs(at[:, None] // 8 - at // 8) <= 2,
        "band": np.abs(at[:, None] - at) <= 50,
        "random": rng.random((160, 160)) < 0.5,
    }[kind]
    # A query without keys, and a key that no query sees.
    dense[90], dense[:, 20] = False, False
    call = check(dense, ["64x1"], dtype=dtype, seed=None)
    lists = [launch.lists for half in call.backward.launches.values() for launch in half]
    ranks = {each.rank for each in lists if each.partial}
    known = {"rectangles": {16}, "band": {tile_lists.INTERVALS}, "random": {tile_lists.BYTES}}
    assert ranks & known[kind]


@pytest.mark.parametrize("scale", [1.0, 0, -0.5])
def test_scales(scale):
    check(plans.pattern(40, 50), ["16x1"], scale=scale)
    bias = torch.randn(H, 40, 50, generator=torch.Generator().manual_seed(1))
    check(plans.pattern(40, 50), ["16x1"], scale=scale, bias=bias)


@pytest.mark.parametrize("kind", ["table", "dense", "large", "forbids"])
def test_biases(kind):
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(H, 70, 80, generator=generator)
    if kind == "table":
        bias = Bias(torch.randn(H, 7, generator=generator), lambda rows, cols: (rows + 3 * cols) % 7)
    elif kind == "large":
        # All keys of a query have the same large bias: it cancels.
        bias = bias + 1e5 * torch.randn(H, 70, 1, generator=generator).round(decimals=1)
        bias = bias.to(torch.float32)
    elif kind == "forbids":
        bias[:, :, :30] = -torch.inf
        bias[:, 5] = -torch.inf
    check(plans.pattern(70, 80), ["16x1", "16x16"], bias=bias, split_keys=32)


def biased(dense, names, bias, *, dtype=torch.float32, batch=2, head_dim=32, scale=None, seed=0, **options):
    """The gradient of a bias, and of what it stands beside, compared with autograd's; returns executor and tensors."""
    q, k, v, grad = tokens(*dense.shape, head_dim, batch, dtype, seed or 0)
    given = {"bias": bias, "scale": scale, "seed": seed, "region_rows": 64, "device": DEVICE, **options}
    call, inputs, _ = plans.prepared(cuda_executor.prepare, dense, names, (q, k, v), **given)
    table = (bias.table if isinstance(bias, Bias) else bias).double().requires_grad_()
    at = np.ogrid[: dense.shape[0], : dense.shape[1]]
    pairs = table[:, torch.from_numpy(bias.index(*at))] if isinstance(bias, Bias) else table
    pairs.retain_grad()
    allowed = torch.from_numpy(dense) & (pairs > -torch.inf).all(0)
    rows = allowed.any(1)
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    masked = reference.attention(leaves[0][:, :, rows], *leaves[1:], allowed[rows], bias=pairs[:, rows], scale=scale)
    masked.backward(grad.cpu().double()[:, :, rows])
    out, first = call(*inputs), None
    for _ in range(2):
        found = backward.gradients_with_bias(call, *inputs, out, grad)
        assert found[3].dtype == torch.float32
        # Gradients of pairs may cancel each other in an entry of a table; their errors do not.
        norms = [x.grad.norm() for x in leaves] + [torch.maximum(table.grad.norm(), pairs.grad.norm())]
        for name, x, y, norm in zip("qkvb", found, (*leaves, table), norms, strict=True):
            error = (x.cpu().double().view(y.shape) - y.grad).norm()
            assert error <= TOLERANCE[dtype] * norm, f"d{name}: {error / norm:.2e}"
        assert first is None or all(torch.equal(x, y) for x, y in zip(first, found, strict=True))
        first = found
    return call, (*inputs, out, grad), first


def table_of(entries, seed=0, mean=0.0):
    table = mean + torch.randn(H, entries, generator=torch.Generator().manual_seed(seed))
    return Bias(table, lambda rows, cols: (31 * rows + 17 * cols) % entries)


@pytest.mark.parametrize(
    "kind, names, dtype",
    cases(["few", "many", "dense", "large", "forbids"], [["16x1"], ["64x64", "16x1"]], DTYPES),
    ids=str,
)
def test_gradients_of_a_bias(kind, names, dtype):
    bias = table_of(7000 if kind == "many" else 7, mean=60.0 if kind == "large" else 0.0)
    if kind == "forbids":
        bias.table[:, ::3] = -torch.inf
    elif kind == "dense":
        bias = torch.randn(H, 100, 90, generator=torch.Generator().manual_seed(1))
    biased(plans.pattern(100, 90), names, bias, dtype=dtype)


@pytest.mark.parametrize("head_dim, scale", cases([8, 48, 128], [None, 0, -0.5]))
def test_gradients_of_a_bias_by_head_dim_and_scale(head_dim, scale):
    biased(plans.pattern(70, 90), ["16x1"], table_of(11), head_dim=head_dim, scale=scale)


@settings(max_examples=4, deadline=None)
@given(
    n_q=st.integers(33, 90), n_k=st.integers(33, 100), density=st.floats(0.02, 0.9), n_global=st.integers(0, 3),
    empty=st.integers(0, 5), batch=st.integers(1, 3), entries=st.sampled_from([2, 9, 4000]),
    programs=st.sampled_from([1, 8, 64]), longest=st.sampled_from([3, 64]), seed=st.integers(0, 99),
)  # fmt: skip
def test_gradients_of_tables_of_random_patterns(
    n_q, n_k, density, n_global, empty, batch, entries, programs, longest, seed
):
    # Parts of tiles, groups of images and pieces of entries, of each number; rows and columns of many keys are split.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bias_gradients, "PROGRAMS", programs)
        patched.setattr(bias_gradients, "LONGEST", longest)
        patched.setattr(backward.backward_lists.facts, "SPLIT_KEYS", 32)
        dense = plans.pattern(n_q, n_k, density, seed, n_global, empty)
        biased(dense, ["16x1", "16x16"], table_of(entries, seed), batch=batch, seed=seed)


def test_a_table_of_repeated_tiles_takes_memory_for_few():
    at = np.arange(640)
    dense = abs(at[:, None] - at) < 70
    bias = Bias(torch.randn(H, 1280), lambda rows, cols: rows - cols + 640)
    call, _, _ = biased(dense, ["64x1"], bias, batch=1, seed=None)
    lists = call.backward.launches["queries"][0].lists
    # Of ten blocks, those that do not touch a border are alike.
    assert len(lists.bias_index) < lists.items[:, tile_lists.Item.STEPS].sum() * 0.7


def test_other_values_of_a_bias_take_the_lists_that_are_there():
    dense = plans.pattern(100, 90, n_global=1)
    call, given, _ = biased(dense, ["16x1", "16x16"], table_of(11), split_keys=32)
    other = table_of(11, seed=5, mean=30.0)
    now = call.with_bias(other.table)
    assert now.launches[0].lists is call.launches[0].lists
    wanted, again, found = biased(dense, ["16x1", "16x16"], other, split_keys=32)
    assert torch.equal(now(*given[:3]), wanted(*given[:3]))
    for x, y in zip(backward.gradients_with_bias(now, *again), found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    # The first values are as they were.
    assert torch.equal(call(*given[:3]), given[3])


def test_a_bias_of_a_batch_without_entries_has_zeros():
    call, given, _ = biased(plans.pattern(40, 40), ["16x1"], table_of(5))
    found = backward.gradients_with_bias(call, *(x[:0] for x in given))
    assert found[3].shape == (H, 5) and not found[3].any()


@settings(max_examples=8, deadline=None)
@given(
    n_q=st.integers(33, 90),
    n_k=st.integers(33, 100),
    density=st.floats(0.02, 0.9),
    n_global=st.integers(0, 3),
    empty=st.integers(0, 5),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_of_random_patterns(n_q, n_k, density, n_global, empty, biased, seed):
    bias = 40 * torch.randn(H, n_q, n_k, generator=torch.Generator().manual_seed(seed)) if biased else None
    check(plans.pattern(n_q, n_k, density, seed, n_global, empty), ["16x1", "16x16"], bias=bias, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else DTYPES[:1], ids=str)
def test_results_and_gradients_of_random_blocks_splits_and_biases_of_extreme_size(dtype, monkeypatch):
    monkeypatch.setattr(backward.backward_lists.facts, "SPLIT_KEYS", 32)
    # Of a processor few and small ones: the interpreter takes seconds for each.
    cases, most = (range(40), 150) if DEVICE == "cuda" else (range(4), 60)
    for seed in cases:
        made = extremes.case(seed, dtype, [["16x1"], ["32x1", "16x16"], ["64x1"]], most=most)
        extremes.check(made, cuda_executor.prepare, backward, reference.TOLERANCE[dtype], DEVICE)


def test_tensors_of_any_strides():
    dense = plans.pattern(70, 70)
    q, k, v, grad = tokens(70, 70, 32, batch=2)
    call, _, _ = plans.prepared(cuda_executor.prepare, dense, ["16x1"], (q, k, v), device=DEVICE)
    packed = torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    expected = wanted(dense, q, k, v, grad, None, None)
    plain = backward.gradients(call, q, k, v, call(q, k, v), grad)
    grads = (grad, grad.transpose(1, 2).contiguous().transpose(1, 2), grad.mT.contiguous().mT)
    for given_grad in grads:
        found = backward.gradients(call, *packed, call(*packed), given_grad)
        assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    # As the gradient of a sum comes.
    ones = torch.ones((), device=DEVICE).expand(2, H, 70, 32)
    expected = wanted(dense, q, k, v, ones, None, None)
    found = backward.gradients(call, *packed, call(*packed), ones)
    # The gradients of q and k vanish but for what v varies: compared with those of v.
    for x, y in zip(found, expected, strict=True):
        assert (x.cpu().double() - y).norm() <= TOLERANCE[torch.float32] * expected[2].norm()


def test_a_batch_without_entries():
    call, (q, k, v), _ = plans.prepared(cuda_executor.prepare, plans.pattern(40, 40), ["16x1"], tokens(40, 40, 32)[:3],
                                        device=DEVICE)  # fmt: skip
    none = [x[:0] for x in (q, k, v)]
    assert [x.shape for x in backward.gradients(call, *none, call(*none), q[:0])] == [(0, H, 40, 32)] * 3


def test_other_tensors_are_refused():
    q, k, v, grad = tokens(40, 50, 32)
    call, _, _ = plans.prepared(cuda_executor.prepare, plans.pattern(40, 50), ["16x1"], (q, k, v), device=DEVICE)
    out = call(q, k, v)
    with pytest.raises(PatternError, match="grad: expected the shape, dtype and device of the result, found"):
        backward.gradients(call, q, k, v, out, grad[:, :, 1:])
    with pytest.raises(PatternError, match="k: expected stride 1 in the last dimension, found 50; pass k"):
        backward.gradients(call, q, k.mT.contiguous().mT, v, out, grad)


def test_what_is_captured_is_to_be_called_once_before(monkeypatch):
    q, k, v, grad = tokens(40, 50, 32)
    call, _, _ = plans.prepared(cuda_executor.prepare, plans.pattern(40, 50), ["16x1"], (q, k, v), device=DEVICE)
    out = call(q, k, v)
    monkeypatch.setattr(backward.launcher, "capturing", lambda: True)
    with pytest.raises(DeviceError, match="differentiate the plan once with tensors of these shapes"):
        backward.gradients(call, q, k, v, out, grad)


# Kernel, rank, head dim, ACROSS, whether some steps are full, and whether items are split. Of kernels of keys those are
# left out that the assembler serialises with 64 queries a step, too: full steps beside masks of two factors, where
# factors are 32 or items are split.
KERNELS = [
    *itertools.product(("query", "key"), (0, 2, 16), (64,), (0,), (False,), (False,)),
    *(
        pytest.param(kernel, *sizes, 0, False, False, marks=pytest.mark.slow)
        for kernel in ("query", "key")
        for sizes in ((1, 64), (16, 128))
    ),
    *(("query", 16, 64, 6, False, False), ("query", 0, 64, 1, False, False)),
    *(("key", 16, 64, 6, False, False), ("key", 0, 64, 1, False, False)),
    *(("key", 32, 64, 0, False, False), ("key", 16, 64, 0, False, True)),
    *(("key", 0, 64, 0, True, False), ("key", 2, 64, 0, True, True), ("key", 16, 64, 0, True, False)),
    # Other head dims and ranks of what is split.
    *(
        pytest.param("key", rank, head_dim, 0, False, True, marks=pytest.mark.slow)
        for rank, head_dim in ((32, 64), (16, 48), (16, 32))
    ),
]


def default_form(kernel, rank, head_dim, full):
    """The form of tiles of 64 rows whose masked steps have such masks."""
    holds = kernel == "key" and backward.narrow(SimpleNamespace(rank=rank, full=full, partial=True))
    return config.for_backward(64, head_dim, torch.bfloat16, holds)


@pytest.mark.parametrize("kernel, rank, head_dim, across, full, split", KERNELS)
def test_it_compiles_for_hopper(kernel, rank, head_dim, across, full, split):
    form = default_form(kernel, rank, head_dim, full)
    constants = {"BLOCK_M": 64, "BLOCK_N": form.step_keys, "HEAD_DIM": head_dim, "RANK": rank, "HEADS": 6}
    constants |= dict(zip(("D0", "D1"), config.HEAD_DIMS[head_dim], strict=True))
    constants |= {"MASK_HEADS": 1, "FULL": full, "PARTIAL": True, "SPLIT": split, "ORDERED": False, "SIGN": 1}
    constants |= {"NUM_STAGES": form.num_stages, "WIDE": False, "ACROSS": across, "PEAKS": 6}
    types = dict.fromkeys(("item_ptr", "row_ptr", "key_ptr", "part_ptr", "count_ptr"), "*i32")
    types |= dict.fromkeys(("acc_ptr", "stat_ptr", "lse_ptr", "delta_ptr", "peak_ptr"), "*fp32")
    types |= dict.fromkeys(("scale_log2", "scale", "mask_scale"), "fp32")
    types |= {"right_ptr": {0: "*fp32", 1: "*fp32", 2: "*u8"}.get(rank, "*bf16")}
    given = {"free": ("n_items", "n_hb", "n_queries", "n_keys"), "num_warps": form.num_warps}
    made = compiled(backward_kernels.__name__, f"tilewright_{kernel}_gradients", constants, types, **given)
    # Stages of two tensors, and of a bias; tokens of the rows, at most.
    stage = 2 * form.step_keys * head_dim * 2 + 4 * 64 * form.step_keys * (rank == 0)
    assert made.shared <= form.num_stages * stage + 4 * 64 * head_dim * 2 + 16384
    # Two products sum over channels, the others over the keys, or queries, of a step; 16 at a time.
    products = made.ptx.count("wgmma.mma_async")
    assert products >= (2 * head_dim + (1 if kernel == "query" else 2) * form.step_keys) // 16
    # So many programs of four warps run side by side, or of eight warps.
    assert made.registers * form.num_warps * 32 * (1 if head_dim > 64 else 3 if kernel == "query" else 2) <= 1 << 16
    assert made.spilled == [0, 0] and not made.serialized


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_plan_is_differentiable_also_checkpointed(compiled):
    dense = plans.pattern(200, 200, empty=0)
    plan = tilewright.plan(dense, heads=H, head_dim=32, dtype=torch.float16, device="cuda", solver="greedy")
    q, k, v, grad = tokens(200, 200, 32, dtype=torch.float16)
    expected = wanted(dense, q, k, v, grad, None, None)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = torch.compile(plan, fullgraph=True) if compiled else plan
    plain = torch.autograd.grad(call(*leaves), leaves, grad)
    again = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves, grad)
    for x, y, z in zip(plain, again, expected, strict=True):
        assert torch.equal(x, y)
        assert (x.cpu().double() - z).norm() <= TOLERANCE[torch.float16] * z.norm()


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_values_of_a_bias_are_differentiable_also_checkpointed(compiled):
    dense, bias = plans.pattern(200, 200, empty=0), table_of(11)
    plan = tilewright.plan(dense, heads=H, head_dim=32, dtype=torch.float16, device="cuda", solver="greedy", bias=bias)
    q, k, v, grad = tokens(200, 200, 32, dtype=torch.float16)
    given = [x.requires_grad_() for x in (q, k, v)]
    call = (
        torch.compile(lambda q, k, v, x: plan(q, k, v, bias=x), fullgraph=True)
        if compiled
        else (lambda q, k, v, x: plan(q, k, v, bias=x))
    )
    at = torch.from_numpy(bias.index(*np.ogrid[:200, :200]))
    for factor in (1.0, -0.5):
        # As after a step of an optimiser.
        values = (factor * bias.table).to("cuda").requires_grad_()
        leaves = [*given, values]
        plain = torch.autograd.grad(call(*leaves), leaves, grad)
        again = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves, grad)
        exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
        masked = reference.attention(*exact[:3], torch.from_numpy(dense), bias=exact[3][:, at])
        wanted_now = torch.autograd.grad(masked, exact, grad.cpu().double())
        for x, y, z in zip(plain, again, wanted_now, strict=True):
            assert torch.equal(x, y)
            assert (x.cpu().double() - z).norm() <= TOLERANCE[torch.float16] * z.norm()


@needs_gpu
def test_training_steps_are_captured():
    dense = plans.pattern(200, 200, 0.2, n_global=1)
    plan = tilewright.plan(dense, heads=H, head_dim=32, dtype=torch.float16, device="cuda", solver="greedy")
    q, k, v, grad = tokens(200, 200, 32, dtype=torch.float16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wanted_now = torch.autograd.grad(plan(*leaves), leaves, grad)
    with torch.cuda.graph(captured, stream=stream):
        found = torch.autograd.grad(plan(*leaves), leaves, grad)
    for _ in range(2):
        for x in found:
            x.fill_(torch.nan)
        captured.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(found, wanted_now, strict=True))
