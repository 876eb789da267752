"""Operators under ``torch.func`` and forward-mode derivatives: as attention in plain torch, or one line."""

import itertools

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright as tw
from tilewright import slices
from tilewright.core.errors import PatternError
from tilewright.packed import pack

BATCH, HEADS, TOKENS, DIM = 2, 2, 24, 8
torch.manual_seed(0)
MASK = torch.rand(TOKENS, TOKENS) < 0.4
MASK |= torch.eye(TOKENS, dtype=torch.bool)
Q, K, V, OTHER = torch.randn(4, BATCH, HEADS, TOKENS, DIM)
BIAS = torch.randn(HEADS, TOKENS, TOKENS)
KEEP = torch.rand(3, 7) < 0.6
KEEP[:, 0] = True
KEPT = KEEP.flatten().nonzero()[:, 0]
X, PACKED = torch.randn(3, 7, 4), torch.randn(3 * 7, 4)
STARTS = [0, *KEEP.sum(1).cumsum(0).tolist()]


@pytest.fixture(scope="module")
def planned():
    return tw.plan(MASK, heads=HEADS, head_dim=DIM, bias=torch.zeros(HEADS, TOKENS, TOKENS), solver="greedy")


@pytest.fixture
def plan(planned):
    """A plan that was never called: what a transform sees first is not to stay."""
    make, given = planned.__reduce__()
    return make(*given)


def written_out(q, k, v, bias=None):
    scores = q @ k.mT * DIM**-0.5
    scores = scores if bias is None else scores + bias
    return scores.masked_fill(~MASK, -torch.inf).softmax(-1) @ v


def loss(attend, *given, **keywords):
    return (attend(*given, **keywords) * OTHER).sum()


def of_image(attend, q, k, v):
    return attend(q[None], k[None], v[None])[0]


TRANSFORMED = {
    "grad": lambda f: func.grad(lambda *x: loss(f, *x), (0, 1, 2))(Q, K, V),
    "vjp": lambda f: func.vjp(f, Q, K, V)[1](OTHER),
    "jacrev": lambda f: func.jacrev(lambda k: f(Q, k, V).mean((0, 2, 3)))(K),
    "vmap": lambda f: func.vmap(lambda q, v: f(q, K, v), (0, 1))(torch.stack([Q, OTHER]), torch.stack([V, Q], 1)),
    "vmap-vmap": lambda f: func.vmap(func.vmap(lambda q: f(q, K, V)))(torch.stack([Q, OTHER]).unflatten(0, (1, 2))),
    "grad-vmap": lambda f: func.grad(lambda q: func.vmap(lambda q: of_image(f, q, K[0], V[0]))(q).pow(2).sum())(Q),
    "samples": lambda f: func.vmap(func.grad(lambda *x: of_image(f, *x).pow(2).sum(), (0, 1, 2)))(Q, K, V),
    "bias": lambda f: func.grad(lambda b: loss(f, Q, K, V, bias=b))(BIAS),
    "biases": lambda f: func.vmap(func.grad(lambda b: loss(f, Q, K, V, bias=b)))(torch.stack([BIAS, -BIAS])),
    "bias-samples": lambda f: func.vmap(func.grad(lambda b, q: loss(f, q, K, V, bias=b)), (None, 0))(
        BIAS, torch.stack([Q, OTHER])
    ),
    "functionalize": lambda f: func.functionalize(lambda q: f(q, K, V))(Q),
    "grad-functionalize": lambda f: func.grad(func.functionalize(lambda q: loss(f, q, K, V)))(Q),
    "traced": lambda f: make_fx(func.grad(lambda q: loss(f, q, K, V)))(Q)(Q),
    "of-traced": lambda f: func.vmap(make_fx(lambda q: f(q, K, V))(Q))(torch.stack([Q, OTHER])),
    "compiled": lambda f: torch.compile(
        func.vmap(func.grad(lambda q: loss(f, q, K, V))), backend="aot_eager", fullgraph=True
    )(torch.stack([Q, OTHER])),
    "jacobian": lambda f: torch.autograd.functional.jacobian(
        lambda k: f(Q, k, V).mean((0, 2, 3)), K, vectorize=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_plan_is_transformed_as_attention_that_is_written_out(plan, transform):
    torch.testing.assert_close(transform(plan), transform(written_out), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(plan(Q, K, V), written_out(Q, K, V), atol=2e-5, rtol=0)


def dual(f, make=lambda q: q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(make(Q.clone()), OTHER), K, V)).tangent


WITHOUT = {
    "jvp": lambda f: func.jvp(lambda v: f(Q, K, v), (V,), (OTHER,)),
    "jacfwd": lambda f: func.jacfwd(lambda s: f(s * Q, K, V))(torch.ones(())),
    "hessian": lambda f: func.hessian(lambda s: f(s * Q, K, V).sum())(torch.ones(())),
    "linearize": lambda f: func.linearize(lambda q: f(q, K, V), Q)[1](OTHER),
    "of-traced": lambda f: func.jvp(make_fx(lambda q: f(q, K, V))(Q), (Q,), (OTHER,)),
    "bias": lambda f: func.jvp(lambda b: f(Q, K, V, bias=b), (BIAS,), (BIAS,)),
    "dual": dual,
    "dual-recorded": lambda f: dual(f, torch.Tensor.requires_grad_),
    "dual-no-grad": lambda f: torch.no_grad()(dual)(f),
    "dual-compiled": lambda f: dual(torch.compile(f, backend="aot_eager")),
}


@pytest.mark.parametrize("transform", WITHOUT.values(), ids=WITHOUT)
def test_a_forward_mode_derivative_is_refused_and_never_zero(plan, transform):
    with pytest.raises(PatternError, match=r"^a plan has no forward-mode derivative: expected grad, vjp or jacrev"):
        transform(plan)
    torch.testing.assert_close(plan(Q, K, V), written_out(Q, K, V), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "twice",
    [
        pytest.param(lambda f: func.grad(func.grad(lambda s: f(s * Q, K, V).sum()))(torch.ones(())), id="grad"),
        pytest.param(lambda f: func.jacrev(func.jacrev(lambda s: f(s * Q, K, V).sum()))(torch.ones(())), id="jacrev"),
        pytest.param(lambda f: torch.autograd.functional.hvp(lambda q: f(q, K, V).sum(), Q, OTHER), id="hvp"),
    ],
)
def test_a_second_derivative_is_refused(plan, twice):
    with pytest.raises(PatternError, match="plans have first derivatives only"):
        twice(plan)


def test_a_transform_inside_of_functionalize_is_refused(plan):
    with pytest.raises(PatternError, match="a plan cannot be called in a transform inside functionalize"):
        func.functionalize(func.grad(lambda q: plan(q, K, V).sum()))(Q)


def test_training_beside_tensors_with_tangents_is_training(plan):
    with forward_ad.dual_level():
        q = Q.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(plan, q, K, V), q)
    (expected,) = torch.autograd.grad(loss(written_out, q, K, V), q)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_plan_with_patterns_by_image_is_batched_image_by_image():
    masks = torch.stack([MASK, MASK.T | torch.eye(TOKENS, dtype=torch.bool)])[:, None]
    plan, q = tw.plan(masks, heads=HEADS, head_dim=DIM, solver="greedy"), torch.stack([Q, OTHER, -Q])

    def expected(q):
        return (q @ K.mT * DIM**-0.5).masked_fill(~masks, -torch.inf).softmax(-1) @ V

    for transform in (func.vmap, lambda f: func.vmap(func.grad(lambda q: f(q).pow(2).sum()))):
        found = transform(lambda q: plan(q, K, V))(q)
        torch.testing.assert_close(found, transform(expected)(q), atol=2e-5, rtol=1e-4)


def attended(packing, x):
    """Packed attention of x [capacity, 4] as two heads, less the rows that hold no token."""
    q = x.view(-1, 2, 2)
    return packing.attend(q, q, q)[: STARTS[-1]]


def attention(x):
    parts = [x[lo:hi].view(-1, 2, 2).transpose(0, 1) for lo, hi in itertools.pairwise(STARTS)]
    return torch.cat([((p @ p.mT * 2**-0.5).softmax(-1) @ p).transpose(0, 1) for p in parts])


PACKINGS = {
    "gather": (lambda p, x: p.gather(x)[: len(KEPT)], lambda x: x.flatten(0, 1)[KEPT], X),
    "scatter": (
        lambda p, x: p.scatter(x),
        lambda x: torch.zeros(21, 4).index_copy(0, KEPT, x[: len(KEPT)]).view(3, 7, 4),
        PACKED,
    ),
    "first": (lambda p, x: p.first(x), lambda x: x[STARTS[:-1]], PACKED),
    "pad": (lambda p, x: p.pad(x, 7)[:, 0], lambda x: x[STARTS[:-1]], PACKED),
    "pack": (lambda p, x: pack.pack(KEEP, 21, x).tokens[: len(KEPT)], lambda x: x.flatten(0, 1)[KEPT], X),
    "pack without a capacity": (
        lambda p, x: pack.pack(KEEP, tokens=x).tokens,
        lambda x: x.flatten(0, 1)[KEPT],
        X,
    ),
    "attend": (attended, attention, PACKED),
}


@pytest.mark.parametrize(("call", "expected", "x"), PACKINGS.values(), ids=PACKINGS)
def test_a_packed_batch_is_transformed_as_what_it_does_and_has_no_tangents(call, expected, x):
    packing = pack.pack(KEEP, 21)
    for transform in (
        lambda f: func.grad(lambda x: f(x).pow(2).sum())(x),
        lambda f: func.vmap(f)(torch.stack([x, 2 * x])),
        lambda f: func.vmap(func.grad(lambda x: f(x).pow(2).sum()))(torch.stack([x, 2 * x])),
    ):
        found = transform(lambda x: call(packing, x))
        torch.testing.assert_close(found, transform(expected), atol=2e-5, rtol=1e-4)
    with pytest.raises(PatternError, match=r"^a packed batch has no forward-mode derivative"):
        func.jvp(lambda x: call(packing, x), (x,), (x,))
    with (
        forward_ad.dual_level(),
        pytest.raises(PatternError, match=r"^a packed batch has no forward-mode derivative"),
    ):
        call(packing, forward_ad.make_dual(x.clone(), x))


def checked(keep):
    packing = pack.pack(keep, 21)
    packing.check()
    return packing.source


def listed(q):
    lists = slices.predict(q, q, keep=0.5, budget=0.6)
    lists.check()
    return lists.keys


READ = {
    "pack": (lambda keep: pack.pack(keep).source, KEEP),
    "check": (checked, KEEP),
    "lengths": (lambda lengths: pack.pack_lengths(lengths).source, KEEP.sum(1)),
    "lists": (listed, torch.randn(1, 1, 130, 64)),
}


@pytest.mark.parametrize(("call", "x"), READ.values(), ids=READ)
def test_what_a_call_reads_on_the_host_is_refused_where_it_is_hidden(call, x):
    with pytest.raises(PatternError, match=r"^\w+: expected .* found a tensor without values, as torch.func, .*have$"):
        func.vmap(call)(torch.stack([x, x]))


def test_a_packed_batch_is_traced_with_a_capacity_alone():
    def call(x, capacity):
        packing = pack.pack(KEEP, capacity)
        return packing.scatter(packing.gather(x))

    traced = torch.jit.trace(lambda x: call(x, 21), (X,))
    torch.testing.assert_close(traced(2 * X), call(2 * X, 21))
    with pytest.raises(PatternError, match="capacity: expected a number in a program that is exported or traced"):
        torch.jit.trace(lambda x: call(x, None), (X,))


def test_slices_are_batched_and_have_no_forward_derivative():
    q, k, v = torch.randn(3, 1, 1, 256, 64)
    lists = slices.predict(q, k, budget=0.5, keep=0.3)
    calls = {
        "attend": lambda q: slices.attend(q, k, v, lists),
        "dense": lambda q: slices.dense(q, k, v)[0],
        "recall": lambda q: slices.recall(q, k, lists),
    }
    for name, call in calls.items():
        batch = torch.stack([q, -q])
        torch.testing.assert_close(func.vmap(call)(batch), torch.stack(list(map(call, batch))))
        # What measures stands for a constant.
        assert bool(func.grad(lambda q, call=call: call(q).sum())(q).any()) == (name != "recall")
        if name != "recall":
            with pytest.raises(PatternError, match="attention to slices has no forward-mode derivative"):
                func.jvp(call, (q,), (q,))
