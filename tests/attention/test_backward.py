"""Gradients of schedules on the CPU, against autograd through the reference in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewright
from helpers import extremes
from helpers.plans import pattern, prepared
from tilewright import reference
from tilewright.attention import backends
from tilewright.attention.cpu import backward
from tilewright.attention.cpu.backward import gradients, gradients_with_bias
from tilewright.attention.cpu.executor import prepare
from tilewright.attention.masks import Bias
from tilewright.core.errors import PatternError

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
    rows = None
    if bias is not None:
        wanted.append((bias.table if isinstance(bias, Bias) else bias).double().requires_grad_())
        rows = wanted[3]
        if isinstance(bias, Bias):
            rows = rows[:, torch.from_numpy(bias.index(*np.ogrid[:n_q, :n_k]))]
        of_pairs = rows
        of_pairs.retain_grad()
        allowed = allowed & (rows > -torch.inf).all(0)
        has_keys, rows = allowed.any(1), rows[:, allowed.any(1)]
    expected = reference.attention(wanted[0][:, :, has_keys], *wanted[1:3], allowed[has_keys], bias=rows)
    expected.backward(grad[:, :, has_keys].double())
    found = (gradients if bias is None else gradients_with_bias)(call, *taken, call(*taken), grad)
    for name, x, y in zip(("q", "k", "v", "bias")[: len(wanted)], found, wanted, strict=True):
        assert x.dtype == (torch.float32 if name == "bias" else dtype)
        x = x.view(y.shape)
        # Gradients of pairs may cancel each other in an entry of a table; their errors do not.
        scale = y.grad.norm() if name != "bias" else torch.maximum(y.grad.norm(), of_pairs.grad.norm())
        error = (x.double() - y.grad).norm() / scale
        assert error <= TOLERANCE[dtype], f"d{name}: {error:.2e}"
    return call, taken, grad, found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_gradients_are_those_of_the_reference(dtype, head_dim):
    _agree(pattern(70, 90), dtype, head_dim=head_dim, split_keys=32)


@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_of_heads_that_workers_do_not_share_evenly(heads):
    _agree(pattern(70, 90), torch.float32, heads=heads, batch=3, split_keys=32)


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
    # Of far larger ones a key takes all the weight, and what is left of the gradients is rounding, in any float32.
    bias = 8 * torch.randn(2, n_q, n_k, generator=torch.Generator().manual_seed(seed)) if biased else None
    _agree(pattern(n_q, n_k, density, seed, n_global=2), torch.float32, split_keys=split_keys, bias=bias, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_of_random_blocks_splits_and_biases_of_extreme_size(dtype):
    for seed in range(60 if dtype == torch.float32 else 12):
        extremes.check(extremes.case(seed, dtype), prepare, backward, reference.TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@settings(max_examples=8, deadline=None)
@given(
    split_keys=st.sampled_from([16, 32, None]),
    entries=st.sampled_from([2, 7, 4000]),
    mean=st.sampled_from([0.0, 60.0]),
    forbidden=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_of_a_table(dtype, split_keys, entries, mean, forbidden, seed):
    make = torch.Generator().manual_seed(seed)
    table = mean + torch.randn(2, entries, generator=make)
    if forbidden and entries > 2:
        # Of all heads: the reference leaves rows without a key out.
        table[:, ::5] = -torch.inf
    bias = Bias(table, lambda rows, cols: (31 * rows + 17 * cols) % entries)
    _agree(pattern(70, 90, 0.4, seed), dtype, split_keys=split_keys, bias=bias, seed=seed)


def test_other_values_of_a_bias_are_those_that_an_executor_is_prepared_for():
    dense, make = pattern(70, 90), torch.Generator().manual_seed(0)
    tables = [scale * torch.randn(2, 11, generator=make) for scale in (1, 90)]
    tokens = [torch.randn(2, 2, n, 32, generator=make) for n in (70, 90, 90)]
    calls = [
        prepared(prepare, dense, ("16x1", "32x16"), tokens, split_keys=16, bias=Bias(x, lambda r, c: (r + c) % 11))[0]
        for x in tables
    ]
    assert torch.equal(calls[0].with_bias(tables[1])(*tokens), calls[1](*tokens))
    assert not torch.equal(calls[0](*tokens), calls[1](*tokens))


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
    with pytest.raises(PatternError, match="first derivatives only"):
        first.sum().backward()


def test_gradients_of_several_at_once():
    plan = tilewright.plan(pattern(40, 40, empty=0), heads=2, head_dim=32, solver="greedy")
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    grads = torch.randn(3, 1, 2, 40, 32)
    wanted = [torch.autograd.grad(plan(q, k, v), (q, k, v), grad) for grad in grads]
    found = torch.autograd.grad(plan(q, k, v), (q, k, v), grads, is_grads_batched=True)
    for x, each in zip(found, zip(*wanted, strict=True), strict=True):
        assert torch.equal(x, torch.stack(each))


class Named(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_who_looks_at_operators_sees_those_of_plans():
    plan = tilewright.plan(pattern(40, 40, empty=0), heads=2, head_dim=32, solver="greedy")
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    with Named() as seen:
        watched = torch.autograd.grad(plan(q, k, v).square().sum(), (q, k, v))
    assert {"attend", "attend_backward"} <= set(seen.names)
    # Also where only one half is looked at.
    out = plan(q, k, v).square().sum()
    with Named() as seen:
        half = torch.autograd.grad(out, (q, k, v))
    assert "attend_backward" in seen.names
    plain = torch.autograd.grad(plan(q, k, v).square().sum(), (q, k, v))
    assert all(map(torch.equal, watched, plain)) and all(map(torch.equal, half, plain))


def _biased(n=40, heads=2, entries=5, form=Bias):
    """A plan with a bias, its tokens and other values, and autograd's result of them."""
    dense, make = pattern(n, n, 0.4, empty=0), torch.Generator().manual_seed(1)
    index = (np.arange(n)[:, None] + 2 * np.arange(n)) % entries
    first = torch.randn(heads, entries, generator=make)
    plan = tilewright.plan(
        dense,
        heads=heads,
        head_dim=32,
        solver="greedy",
        bias=Bias(first, lambda rows, cols: index[rows, cols]) if form is Bias else first[:, index],
    )
    tokens = [torch.randn(1, heads, n, 32, generator=make, requires_grad=True) for _ in range(3)]
    values = torch.randn(heads, entries, generator=make)
    values = (values if form is Bias else values[:, index]).requires_grad_()
    masked = reference.attention(
        *tokens, torch.from_numpy(dense), bias=values[:, torch.from_numpy(index)] if form is Bias else values
    )
    return plan, tokens, values, masked.float()


RUNS = {
    "eager": lambda plan: lambda q, k, v, bias: plan(q, k, v, bias=bias),
    "compiled": lambda plan: torch.compile(
        lambda q, k, v, bias: plan(q, k, v, bias=bias), backend="aot_eager", fullgraph=True
    ),
    "checkpointed": lambda plan: (
        lambda *given: checkpoint(lambda q, k, v, bias: plan(q, k, v, bias=bias), *given, use_reentrant=False)
    ),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("form", [Bias, torch.Tensor], ids=["table", "dense"])
def test_a_bias_that_is_given_in_a_call_is_differentiated(form, run):
    plan, tokens, values, masked = _biased(form=form)
    wanted = torch.autograd.grad(masked.square().sum(), (*tokens, values))
    torch.compiler.reset()
    out = run(plan)(*tokens, values)
    torch.testing.assert_close(out, masked, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), (*tokens, values))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_a_bias_alone_may_need_a_gradient_and_is_read_in_each_call():
    plan, tokens, values, masked = _biased()
    tokens = [x.detach() for x in tokens]
    (first,) = torch.autograd.grad(plan(*tokens, bias=values).square().sum(), values)
    wanted = masked.detach()
    with torch.no_grad():
        own = plan(*tokens)
        torch.testing.assert_close(plan(*tokens, bias=values), wanted, rtol=1e-4, atol=1e-5)
        values.mul_(3)
        assert not torch.allclose(plan(*tokens, bias=values), wanted, atol=1e-2)
        # Those that the plan was made with stay.
        assert torch.equal(plan(*tokens), own)
    (second,) = torch.autograd.grad(plan(*tokens, bias=values).square().sum(), values)
    assert not torch.allclose(first, second, rtol=0.1)


def test_a_table_takes_no_memory_for_each_pair(monkeypatch):
    n, held = 1024, []
    memory = backward._Heads._memory
    monkeypatch.setattr(backward._Heads, "_memory", lambda *a: held.append(memory(*a).numel()) or memory(*a))
    at = np.arange(n)
    bias = Bias(torch.randn(2, 2 * n), lambda rows, cols: rows - cols + n)
    plan = tilewright.plan(abs(at[:, None] - at) < 20, heads=2, head_dim=32, solver="greedy", bias=bias)
    tokens = [torch.randn(1, 2, n, 32) for _ in range(3)]
    values = bias.table.clone().requires_grad_()
    plan(*tokens, bias=values).sum().backward()
    # Of 2 heads it would be 2 million.
    assert values.grad.any() and max(held) < n * n / 4


def test_gradcheck_of_a_table():
    """By differences in float32: steps and tolerances are those that its rounding allows."""
    plan, tokens, values, _ = _biased(n=20)
    tokens = [x.detach() for x in tokens]
    assert torch.autograd.gradcheck(
        lambda bias: plan(*tokens, bias=bias), values, eps=1e-2, atol=2e-3, rtol=2e-2, nondet_tol=0.0
    )


def test_a_plan_may_be_dropped_before_the_backward():
    plan, tokens, values, masked = _biased()
    out = plan(*tokens, bias=values)
    del plan
    (found,) = torch.autograd.grad(out.square().sum(), values)
    torch.testing.assert_close(found, torch.autograd.grad(masked.square().sum(), values)[0], rtol=1e-4, atol=1e-4)


def test_values_that_do_not_fit_are_named():
    plan, tokens, values, _ = _biased()
    for wrong, found in ((values[:, 1:], r"\[2, 4\]"), (values.long(), "int64"), (values.to("meta"), "meta")):
        with pytest.raises(
            PatternError, match=rf"bias: expected a float tensor \[2, 5\] on cpu, as planned; found .*{found}"
        ):
            plan(*tokens, bias=wrong)
    with pytest.raises(PatternError, match="bias: expected none, as planned; found"):
        plan.with_bias(None)(*tokens, bias=values)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_device_without_a_backward_says_so(compiled, monkeypatch):
    plan, tokens, values, _ = _biased()
    monkeypatch.setattr(backends, "differentiates", lambda kind: False)
    torch.compiler.reset()
    call = RUNS["compiled" if compiled else "eager"](plan)
    # A compiler wraps what is raised while it traces.
    with pytest.raises(Exception, match=r"plans for cpu have no backward: call them under torch.no_grad\(\)"):
        call(*tokens, values)
    with torch.no_grad():
        call(*tokens, values)
