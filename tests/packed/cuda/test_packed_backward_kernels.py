"""Gradients of packed batches on a GPU, against autograd through the reference in float64, where there is no GPU under
Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from helpers.cases import rest_slow
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.hopper import compiled
from tilewright import reference
from tilewright.attention.cuda import bias_kernels, config
from tilewright.core.errors import PatternError
from tilewright.packed import pack
from tilewright.packed.cuda import backward_kernels, executor

# bfloat16 is silently wrong under some releases of the interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# A gradient sums products of four rounded factors where the result sums those of two: twice its tolerance.
TOLERANCE = {dtype: 2 * error for dtype, error in reference.TOLERANCE.items()}


@pytest.fixture(autouse=True)
def by_triton(monkeypatch):
    """Packed batches by Triton's kernels, also where they are interpreted."""
    monkeypatch.setitem(pack.EXECUTORS, DEVICE, "tilewright.packed.cuda.executor")
    pack._executor.cache_clear()
    yield
    pack._executor.cache_clear()


def packing_of(lengths, capacity=None, rows=None):
    keep = torch.arange(max(lengths) + 1) < torch.tensor(lengths)[:, None]
    return pack.pack(keep.to(DEVICE), capacity or sum(lengths), rows=rows)


def tokens(n, heads, head_dim, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, head_dim, generator=make).to(DEVICE, dtype) for _ in range(4)]


def wanted(lengths, q, k, v, grad):
    """Gradients by autograd through the reference in float64, an image at a time; zeros in rows of no image."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    grad, begin = grad.cpu().double(), 0
    for length in lengths:
        of_image = [x[begin : begin + length].transpose(0, 1)[None] for x in leaves]
        out = reference.attention(*of_image, torch.ones(length, length, dtype=torch.bool))
        out.backward(grad[begin : begin + length].transpose(0, 1)[None])
        begin += length
    return [x.grad for x in leaves]


def check(lengths, *, capacity=None, rows=None, heads=2, head_dim=32, dtype=torch.float32, seed=0):
    packing = packing_of(lengths, capacity, rows)
    q, k, v, grad = tokens(packing.capacity, heads, head_dim, dtype, seed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = None
    for _ in range(2):
        found = torch.autograd.grad(packing.attend(*leaves), leaves, grad)
        for name, x, y in zip("qkv", found, wanted(lengths, q, k, v, grad), strict=True):
            assert x.dtype == dtype and x.is_contiguous() and not x.isnan().any()
            assert not x[sum(lengths) :].any()
            # An image of one token has no gradient of its query, but rounding: compared with that of the values.
            error = (x.cpu().double() - y).norm() / max(y.norm(), grad.norm().cpu() / 10)
            assert error <= TOLERANCE[dtype], f"d{name}: {error:.2e}"
        # The sums have one order.
        assert first is None or all(torch.equal(x, y) for x, y in zip(first, found, strict=True))
        first = found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_gradients_are_those_of_the_reference(rows, dtype):
    check([40, 1, 130, 64], rows=rows, capacity=260, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 48, 64, 128])
def test_head_dims(head_dim, dtype):
    check([33, 20], head_dim=head_dim, dtype=dtype)


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    spare=st.integers(0, 40),
    heads=st.integers(1, 3),
    rows=st.sampled_from([None, 16, 32]),
    seed=st.integers(0, 99),
)
def test_gradients_of_random_batches(lengths, spare, heads, rows, seed):
    check(lengths, capacity=sum(lengths) + spare, heads=heads, rows=rows, seed=seed)


def test_rows_of_no_image_give_nothing_to_others():
    lengths = [20, 30]
    packing = packing_of(lengths, 70)
    q, k, v, grad = tokens(70, 2, 32)
    for x in (q, k, v, grad):
        x[50:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for x, y in zip(
        torch.autograd.grad(packing.attend(*leaves), leaves, grad), wanted(lengths, q, k, v, grad), strict=True
    ):
        assert not x[50:].any() and not x.isnan().any()
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4)


def test_tensors_of_any_strides():
    lengths = [20, 30]
    packing = packing_of(lengths)
    q, k, v, grad = tokens(50, 2, 32)
    together = torch.stack((q, k, v), 1).requires_grad_()
    expected = torch.stack(wanted(lengths, q, k, v, grad), 1)
    # As the gradient of a sum comes, and one whose values are apart.
    for given_grad in (grad, grad.mT.contiguous().mT):
        (found,) = torch.autograd.grad(packing.attend(*together.unbind(1)), together, given_grad)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    ones = torch.ones((), device=DEVICE).expand(50, 2, 32)
    (found,) = torch.autograd.grad(packing.attend(*together.unbind(1)).sum(), together)
    expected = torch.stack(wanted(lengths, q, k, v, ones), 1)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_a_batch_that_did_not_fit_has_gradients_that_are_nan():
    packing = packing_of([30, 20], 40)
    leaves = [x.requires_grad_() for x in tokens(40, 2, 32)[:3]]
    assert all(x.isnan().all() for x in torch.autograd.grad(packing.attend(*leaves).sum(), leaves))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_is_differentiable_once_also_checkpointed(compiled):
    lengths = [20, 30]
    packing = packing_of(lengths)
    q, k, v, grad = tokens(50, 2, 32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.compiler.reset()

    def attend(q, k, v):
        return packing.attend(q, k, v)

    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    plain = torch.autograd.grad(call(*leaves), leaves, grad)
    again = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves, grad)
    for x, y, z in zip(plain, again, wanted(lengths, q, k, v, grad), strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x.cpu().double(), z, rtol=1e-4, atol=1e-4)
    (first,) = torch.autograd.grad(packing.attend(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(PatternError, match="packed attention has first derivatives only"):
        first.sum().backward()


def test_a_gradient_of_another_form_is_named():
    packing = packing_of([20, 30])
    q, k, v, grad = tokens(50, 2, 32)
    out = packing.attend(q, k, v)
    call = executor.Executor(packing.offsets, torch.device(packing.lists.device)).attend_backward
    with pytest.raises(
        PatternError, match=r"grad: expected torch.float32 of shape \(50, 2, 32\), found .*\(49, 2, 32\)"
    ):
        call(packing.lists, q, k, v, out, grad[1:])
    with pytest.raises(PatternError, match="q: expected stride 1 in the last dimension, found"):
        call(packing.lists, q.mT.contiguous().mT, k, v, out, grad)


@pytest.mark.parametrize(
    "kernel",
    ["tilewright_packed_query_gradients", "tilewright_packed_key_gradients", "tilewright_bias_gradients"],
)
@pytest.mark.parametrize("head_dim", rest_slow([32, 64, 128], 2))
def test_it_compiles_for_hopper(kernel, head_dim):
    form = config.for_backward(64, head_dim, torch.bfloat16)
    constants = {"BLOCK_M": 64, "ROWS": 64, "BLOCK_N": form.step_keys, "HEAD_DIM": head_dim, "HEADS": 6}
    constants |= dict(zip(("D0", "D1"), config.HEAD_DIMS[head_dim], strict=True))
    constants |= {"NUM_STAGES": form.num_stages, "WIDE": False, "ORDERED": False, "SIGN": 1}
    types = dict.fromkeys(("list_ptr", "use_ptr", "part_ptr", "row_ptr", "key_ptr"), "*i32")
    types |= dict.fromkeys(("stats_ptr", "lse_ptr", "delta_ptr", "sum_ptr", "bias_ptr"), "*fp32")
    types |= dict.fromkeys(("scale_log2", "scale"), "fp32")
    free = "work_at", "capacity", "n_parts", "batch", "n_groups", "n_queries"
    module = backward_kernels if hasattr(backward_kernels, kernel) else bias_kernels
    made = compiled(module.__name__, kernel, constants, types, free=free, num_warps=form.num_warps)
    # What a multiprocessor has: two programs of four warps, or one of eight, with their stages.
    assert made.shared * (1 if head_dim > 64 else 2) <= 227 * 1024
    assert made.ptx.count("wgmma.mma_async") >= 2 * head_dim // 16
    assert made.registers * form.num_warps * 32 * (1 if head_dim > 64 else 2) <= 1 << 16
    assert made.spilled == [0, 0] and not made.serialized
