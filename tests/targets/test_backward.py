"""Gradients of schedules on the CPU, against autograd through the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import tilewright
from helpers.plans import pattern, prepared
from tilewright import reference
from tilewright.core.errors import PatternError
from tilewright.targets.cpu.backward import gradients
from tilewright.targets.cpu.executor import prepare

# A gradient sums products of four rounded factors where the result sums those of two: twice its tolerance.
TOLERANCE = {dtype: 2 * error for dtype, error in reference.TOLERANCE.items()}


def _agree(dense, dtype, *, batch=2, heads=2, head_dim=32, bias=None, seed=0, **options):
    make = torch.Generator().manual_seed(seed)
    n_q, n_k = dense.shape
    q, k, v, grad = (torch.randn(batch, heads, n, head_dim, generator=make).to(dtype) for n in (n_q, n_k, n_k, n_q))
    call, taken, _ = prepared(prepare, dense, ("16x1", "32x16"), (q, k, v), seed=seed, bias=bias, **options)
    wanted = [x.double().requires_grad_() for x in (q, k, v)]
    allowed = torch.from_numpy(dense)
    # Rows without a key have no gradient, but NaN in autograd's softmax: their result is left out.
    has_keys = allowed.any(1)
    rows = None if bias is None else bias[:, has_keys]
    expected = reference.attention(wanted[0][:, :, has_keys], *wanted[1:], allowed[has_keys], bias=rows)
    expected.backward(grad[:, :, has_keys].double())
    found = gradients(call, *taken, call(*taken), grad)
    for name, x, y in zip("qkv", found, wanted, strict=True):
        assert x.dtype == dtype
        error = (x.double() - y.grad).norm() / y.grad.norm()
        assert error <= TOLERANCE[dtype], f"d{name}: {error:.2e}"
    return call, taken, grad, found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_gradients_are_those_of_the_reference(dtype, head_dim):
    _agree(pattern(70, 90), dtype, head_dim=head_dim, split_keys=32)


@settings(max_examples=25, deadline=None)
@given(
    n_q=st.integers(33, 80),
    n_k=st.integers(16, 100),
    density=st.floats(0.02, 0.9),
    split_keys=st.sampled_from([16, 32, None]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_of_random_patterns(n_q, n_k, density, split_keys, biased, seed):
    bias = 40 * torch.randn(2, n_q, n_k, generator=torch.Generator().manual_seed(seed)) if biased else None
    _agree(pattern(n_q, n_k, density, seed, n_global=2), torch.float32, split_keys=split_keys, bias=bias, seed=seed)


def test_gradients_of_tokens_in_plan_order_with_a_scale_of_zero():
    dense = pattern(70, 90)
    q, k, v, grad = (torch.randn(1, 2, n, 32) for n in (70, 90, 90, 70))
    call, taken, _ = prepared(prepare, dense, ("16x1",), (q, k, v), ordered=True, scale=0.0)
    dq, dk, dv = gradients(call, *taken, call(*taken), grad)
    assert not dq.any() and not dk.any() and dv.any()


def test_two_calls_give_the_same_bits():
    call, taken, grad, found = _agree(pattern(70, 90), torch.float32, split_keys=16)
    again = gradients(call, *taken, call(*taken), grad)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_plan_is_differentiable_once_also_checkpointed(compiled):
    dense = pattern(70, 70, empty=0)
    plan = tilewright.plan(dense, heads=2, head_dim=32, solver="greedy")
    tokens = [torch.randn(1, 2, 70, 32, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(reference.attention(*tokens, torch.from_numpy(dense)).square().sum(), tokens)
    call = torch.compile(plan, backend="aot_eager", fullgraph=True) if compiled else plan
    plain = torch.autograd.grad(call(*tokens).square().sum(), tokens)
    again = checkpoint(call, *tokens, use_reentrant=False)
    for x, y, z in zip(plain, torch.autograd.grad(again.square().sum(), tokens), wanted, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, z, rtol=1e-4, atol=1e-4)


def test_a_second_derivative_is_refused():
    plan = tilewright.plan(pattern(70, 70), heads=2, head_dim=32, solver="greedy")
    q, k, v = (torch.randn(1, 2, 70, 32, requires_grad=True) for _ in range(3))
    (first,) = torch.autograd.grad(plan(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(PatternError, match="no derivative"):
        first.sum().backward()
