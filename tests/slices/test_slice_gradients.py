"""Gradients of attention by slice lists: against float64, with text, compiled, and what is refused."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import library

from helpers.hopper import compiled
from helpers.slices import DTYPES, mask_of, qkv, tokens
from tilewright import reference, slices
from tilewright.core.errors import PatternError
from tilewright.slices.cuda import forms, gradient_kernel

# Norms of errors over norms: of 16-bit weights and of their gradients, each rounded once, and of a result in 16 bits.
TOLERANCE = {dtype: 4 * reference.TOLERANCE[dtype] for dtype in DTYPES}


def loss(out, lse, grad, lse_grad):
    """A number whose gradients of both results are these; groups without keys have log-sum-exps of -inf."""
    found = (out.double() * grad.to(out.device).double()).sum()
    return found + (torch.where(lse.isinf(), 0, lse).double() * lse_grad.to(lse.device).double()).sum()


def right(lists, q, k, v, *grads):
    """Gradients of masked attention in float64, on the CPU."""
    given = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    heads = [[torch.from_numpy(lists.graph(b, h).to_dense()) for h in range(q.shape[1])] for b in range(len(q))]
    mask = torch.stack([torch.stack(of_entry) for of_entry in heads])
    scores = (given[0] @ given[1].mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~mask.any(-1, keepdim=True), 0)
    return torch.autograd.grad(loss(weights @ given[2], scores.logsumexp(-1), *grads), given)


def check(lists, q, k, v):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    grads = tokens(*q.shape, seed=7), tokens(*q.shape[:3], seed=8)
    found = torch.autograd.grad(loss(*slices.attend(*given, lists, lse=True), *grads), given)
    for x, one, other in zip(given, found, right(lists, *given, *grads), strict=True):
        assert one.shape == x.shape and one.dtype == x.dtype
        error = (one.cpu().double() - other).norm() / other.norm().clamp(min=1)
        assert error <= TOLERANCE[x.dtype], f"{error:.1e}"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_lists(data, device):
    batch, heads = data.draw(st.integers(1, 2), "B"), data.draw(st.integers(1, 2), "H")
    rows, width = data.draw(st.sampled_from([16, 64, 128]), "M"), data.draw(st.sampled_from([1, 16]), "width")
    n_q, n_k = data.draw(st.integers(1, 2 * rows + 1), "N_q"), data.draw(st.integers(1, 131), "N_k")
    runs = -(-n_k // width)
    counts = [[[data.draw(st.integers(0, runs)) for _ in range(-(-n_q // rows))] for _ in range(heads)]] * batch
    mask = mask_of(counts, runs).repeat_interleave(width, -1)[..., :n_k].to(device)
    head_dim, dtype = data.draw(st.sampled_from([64, 128]), "D"), data.draw(st.sampled_from(DTYPES), "dtype")
    lists = slices.from_mask(mask, n_q, rows=rows, width=width)
    check(lists, *qkv(batch, heads, n_q, n_k, head_dim, dtype=dtype, device=device))


def test_text_and_padding(device):
    q, k, v = qkv(2, 1, 90, 90, 64, device=device)
    options = {"keep": 0.5, "budget": 0.8, "least": 1, "rows": 32, "text": (5, 17)}
    # Lists of keys whose queries need a gradient themselves.
    lists = slices.predict(q.requires_grad_(), k, lengths=torch.tensor([80, 90], device=device), **options)
    check(lists, q, k, v)


def test_dense_attention(device):
    q, k, v = (x.requires_grad_() for x in qkv(2, 1, 40, 70, 64, device=device))
    lengths = torch.tensor([33, 70], dtype=torch.int32, device=device)
    lists = slices.attention._all_keys(q, 70, lengths)
    grads = tokens(*q.shape, seed=7), tokens(*q.shape[:3], seed=8)
    found = torch.autograd.grad(loss(*slices.dense(q, k, v, lengths=lengths), *grads), (q, k, v))
    for one, other in zip(found, right(lists, q, k, v, *grads), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-5)


def test_one_gradient_alone(device):
    """A result of which somebody needs the log-sum-exps alone, and a gradient without memory of its own."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 40, 70, 64, device=device))
    lists = slices.from_mask(mask_of([[[60, 30, 9]]], 70).to(device), 40, rows=16)
    out, lse = slices.attend(q, k, v, lists, lse=True)
    zero, one = torch.zeros(1, 1, 40, 64), torch.ones(1, 1, 40)
    for result, grads in ((lse, (zero, one)), (out, (zero + 1, one * 0))):
        found = torch.autograd.grad(result.sum(), (q, k, v), retain_graph=True)
        for x, y in zip(found, right(lists, q, k, v, *grads), strict=True):
            torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-5)


def test_lists_that_did_not_fit_have_no_gradient(device):
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 40, 100, 64, device=device))
    lists = slices.from_mask(mask_of([[[90, 30, 9]]], 100).to(device), 40, rows=16, budget=0.5)
    for found in torch.autograd.grad(slices.attend(q, k, v, lists).sum(), (q, k, v)):
        assert found.isnan().all()


def test_compiled_and_transformed(device):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 40, 90, 64, device=device))
    weights = tokens(1, 2, 40, 64, device=device)

    def network(q, k, v):
        lists = slices.predict(q, k, keep=0.4, budget=0.8, rows=16, least=1)
        return (slices.attend(q, k, v, lists) * weights).sum()

    right = torch.autograd.grad(network(q, k, v), (q, k, v))
    made = torch.compile(network, fullgraph=True, backend="aot_eager")
    for found in (torch.autograd.grad(made(q, k, v), (q, k, v)), torch.func.grad(network, (0, 1, 2))(q, k, v)):
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_operator_is_well_formed_and_has_no_second_derivative(device):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 40, 90, 64, device=device))
    lists = slices.from_mask(mask_of([[[70, 3, 0], [4, 0, 64]]], 90).to(device), 40, rows=16)
    out, lse = slices.attend(q, k, v, lists, lse=True)
    given = [x.detach() for x in (out, *lists.tensors, q, k, v, out, lse)]
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    backward = torch.ops.tilewright.slices_backward.default
    library.opcheck(backward, (given[0], None, *given[1:], 0.125, list(lists.layout)), **checks)
    (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(
        PatternError, match=r"^attention by slices has first derivatives only, found a call for a second"
    ):
        torch.autograd.grad(found.sum(), q)


def test_what_is_no_function_of_lists_has_no_gradient(device):
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 40, 70, 64, device=device))
    lists = slices.from_mask(mask_of([[[60, 30, 9]]], 70).to(device), 40, rows=16)
    assert not slices.recall(q, k, lists).requires_grad
    with pytest.raises(PatternError, match=r"^q, k, v: slices.rest has no backward; call it under torch.no_grad\(\)$"):
        slices.rest(q, k, v, lists)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernel_for_hopper_spills_nothing(head_dim):
    form = forms.of_gradients(128, head_dim, torch.bfloat16, 227 << 10)
    constants = {"HEADS": 3, "BLOCK_M": 128, "BLOCK_N": form.step_keys, "RUN": 1, "HEAD_DIM": head_dim}
    constants |= {"NUM_STAGES": form.num_stages, "WIDE": False, "lse_grad_ptr": None}
    types = dict.fromkeys(("key_ptr", "count_ptr", "order_ptr", "state_ptr"), "*i32")
    types |= dict.fromkeys(("dk_ptr", "dv_ptr", "lse_ptr"), "*fp32") | {"scale_log2": "fp32", "scale": "fp32"}
    given = {"free": ("n_queries", "n_keys", "groups"), "num_warps": form.num_warps}
    made = compiled(gradient_kernel.__name__, "tilewright_slice_gradients", constants, types, **given)
    assert made.spilled == [0, 0] and not made.serialized
    # Its products are those of tensor cores, its loads run ahead, and it adds four sums at a time.
    assert "wgmma.mma_async" in made.ptx and "cp.async.cg" in made.ptx and "add.v4.f32" in made.ptx
    assert made.shared <= forms.shared_bytes(form, 128, head_dim, 2) + (head_dim + 2 * form.step_keys) * 128 * 2
