"""Neighbourhood attention as an operator: compiled, exported, transformed, differentiated once."""

import pytest
import torch
from torch import func, library

import tilewright as tw
from tilewright import reference
from tilewright.core.errors import PatternError

torch.manual_seed(0)
Q, K, V = torch.randn(3, 2, 7, 9, 2, 8)
EXTRA = torch.randn(2, 2, 3, 2, 8).unbind()


def attend(q, k, v, **more):
    return tw.neighborhood.attend(q, k, v, (3, 5), stride=(1, 2), **more)


def close(found, wanted):
    assert found.dtype == wanted.dtype and (found - wanted).abs().max() <= 1e-5


def compiled(function, **more):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **more)


def test_compiled_code_has_no_breaks_and_grids_of_other_sizes_no_code_of_their_own():
    frames = torch._dynamo.utils.counters["stats"]
    call = compiled(lambda q, k, v, extra: attend(q, k, v, extra=extra, lse=True), dynamic=True)
    before = frames["unique_graphs"]
    for cut in 0, 1, 2:
        q, k, v = (x[:, cut:, cut:].clone() for x in (Q, K, V))
        for found, wanted in zip(call(q, k, v, EXTRA), attend(q, k, v, extra=EXTRA, lse=True), strict=True):
            close(found, wanted)
    assert frames["unique_graphs"] - before <= 1


def test_compiled_code_has_gradients():
    def loss(q, k, v, keys, values):
        return attend(q.sin(), k, v, extra=(keys, values)).square().sum()

    leaves = [x.clone().requires_grad_() for x in (Q, K, V, *EXTRA)]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    torch._dynamo.reset()
    for found, other in zip(
        torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves), wanted, strict=True
    ):
        close(found, other)


def test_a_plan_is_compiled():
    plan = tw.neighborhood.plan((7, 9), 3, heads=2, head_dim=8)
    close(compiled(lambda q: plan(q, K, V))(Q), plan(Q, K, V))
    flat = Q.flatten(1, 2)
    close(compiled(lambda q: plan(q, K.flatten(1, 2), V.flatten(1, 2)))(flat), plan(Q, K, V).flatten(1, 2))


def test_an_exported_program_needs_no_file():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    sizes = {1: torch.export.Dim("rows", min=4), 2: torch.export.Dim("columns", min=6)}
    program = torch.export.export(Layer(), (Q, K, V), dynamic_shapes=(sizes,) * 3)
    for given in (Q, K, V), tuple(x[:, 2:, 1:] for x in (Q, K, V)):
        close(program.module()(*given), attend(*given))


@pytest.mark.parametrize("extra", [(None, None), EXTRA])
def test_operators_are_what_their_fakes_say(extra):
    given = [x.clone().requires_grad_() for x in (Q, K, V)]
    rule = tw.neighborhood.Rule((3, 5), (1, 2), (1, 1), (False, True)).ints
    library.opcheck(torch.ops.tilewright.neighborhood_attend.default, (*given, *extra, rule, 0.3, 2, None))


def test_a_second_derivative_is_refused():
    q = Q.clone().requires_grad_()
    (found,) = torch.autograd.grad(attend(q, K, V).sum(), q, create_graph=True)
    with pytest.raises(PatternError, match="neighbourhood attention has first derivatives only"):
        torch.autograd.grad(found.sum(), q)
    with pytest.raises(PatternError, match="neighbourhood attention has no forward-mode derivative"):
        func.jvp(lambda q: attend(q, K, V), (Q,), (Q,))


def test_transforms_see_the_operator():
    def loss(q, k, v):
        return attend(q, k, v).pow(2).sum()

    def exact(q, k, v):
        return reference.neighborhood(q, k, v, (3, 5), stride=(1, 2))[0].pow(2).sum().float()

    for found, wanted in zip(func.grad(loss, (0, 1, 2))(Q, K, V), func.grad(exact, (0, 1, 2))(Q, K, V), strict=True):
        assert (found - wanted).abs().max() < 1e-4
    batch = torch.stack([Q, K, V])
    each = torch.stack([attend(x, K, V) for x in batch])
    close(func.vmap(lambda q: attend(q, K, V))(batch), each)
    given = torch.stack([loss_gradient(loss, x) for x in batch])
    close(func.vmap(func.grad(lambda q: loss(q, K, V)))(batch), given)


def loss_gradient(loss, q):
    q = q.clone().requires_grad_()
    return torch.autograd.grad(loss(q, K, V), q)[0]


def test_gradients_of_a_result_alone_and_of_sums_alone():
    q = Q.clone().requires_grad_()
    out, lse = attend(q, K, V, lse=True)
    exact = Q.double().requires_grad_()
    wanted, sums = reference.neighborhood(exact, K, V, (3, 5), stride=(1, 2))
    for one, other in ((out, wanted), (lse, sums)):
        (found,) = torch.autograd.grad(one.sum(), q, retain_graph=True)
        (expected,) = torch.autograd.grad(other.sum(), exact, retain_graph=True)
        assert (found - expected).abs().max() < 1e-5
    # Kept for the backward alone.
    assert attend(q, K, V).requires_grad


def test_equal_calls_have_equal_gradients_in_any_number_of_threads():
    def found(threads):
        torch.set_num_threads(threads)
        leaves = [
            x.clone().requires_grad_()
            for x in torch.randn(3, 1, 9, 17, 16, 2, 8, generator=torch.Generator().manual_seed(0))
        ]
        return torch.autograd.grad(tw.neighborhood.attend(*leaves, (5, 9, 7)).square().sum(), leaves)

    threads = torch.get_num_threads()
    try:
        each = [found(n) for n in (1, 2, 2)]
    finally:
        torch.set_num_threads(threads)
    for other in each[1:]:
        assert all(torch.equal(x, y) for x, y in zip(each[0], other, strict=True))
