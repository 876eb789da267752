"""Kernels of neighbourhood attention, on a GPU or under the interpreter, against the oracle; the choice of boxes."""

from dataclasses import replace
from math import prod

import pytest
import torch

import tilewright as tw
from helpers.gpu import TRITON_DEVICE
from tilewright import reference
from tilewright.core.errors import DeviceError
from tilewright.neighborhood import rule as rules
from tilewright.neighborhood.cuda import forms, launch
from tilewright.neighborhood.cuda.forms import Form

GPU = TRITON_DEVICE == "cuda"
KIND = torch.float16 if GPU else torch.float32
# A grid, a rule, forms and what is special about tensors. Together they take each branch of the kernels.
CASES = {
    "whole chunks and a rest": ((5, 6, 7), {"window": 3}, Form((2, 2, 4), 0, 16), {}),
    "one chunk, runs, extra keys": ((19, 8), {"window": 5, "stride": 2}, Form((4, 4), 0, 16, run=2), {"extra": 3}),
    "two rests": ((6, 8, 7), {"window": (3, 4, 4)}, Form((4, 2, 2), 0, 32), {"dim": 24, "batch": 1}),
    "dilation, few heads": ((9, 8), {"window": 4, "dilation": 2}, Form((4, 4), 1, 16), {"heads": (2, 1), "values": 32}),
    "causal in one axis, no scale": (
        (5, 6), {"window": (3, 5), "stride": (2, 1), "causal": (True, False)}, Form((4, 4), 0, 16), {"scale": -0.3},
    ),
    "cut": ((7, 6, 5), {"window": (4, 3, 5), "stride": (3, 1, 1), "border": "cut"}, Form((2, 2, 4), 1, 16), {}),
    "a sequence": ((70,), {"window": 33}, Form((16,), 0, 16, run=2), {"extra": 2}),
    "a causal sequence": ((45,), {"window": 11, "dilation": 3, "causal": True}, Form((16,), 0, 16), {}),
    "more rows and columns than bits": (
        (3, 40, 5), {"window": (1, 35, 3)}, Form((1, 16, 1), 0, 16), {"batch": 1},
    ),
}  # fmt: skip


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRITON_DEVICE, KIND)


def tensors(grid, heads=(1, 1), dim=16, values=None, extra=0, batch=2, **_):
    """``(q, k, v, extra keys and values or None)``; q and k are views of one projection where they can be."""
    (h, g), values = heads, values or dim
    q, k, v = (drawn(batch, *grid, *own, seed=at) for at, own in enumerate(((h, dim), (g, dim), (g, values))))
    if h == g:
        q, k = drawn(batch, *grid, 2, h, dim, seed=0).unbind(-3)
    return q, k, v, (drawn(batch, extra, g, dim, seed=3), drawn(batch, extra, g, values, seed=4)) if extra else None


def made(grid, options):
    """The rule that `attend` makes of its options."""
    stated = {"stride": 1, "dilation": 1, "causal": False, "border": "shift"} | options
    return rules.make(len(grid), *(stated[name] for name in ("window", "stride", "dilation", "causal", "border")))


@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_are_those_of_the_oracle(name):
    grid, options, form, special = CASES[name]
    q, k, v, extra = tensors(grid, **special)
    scale = special.get("scale", q.shape[-1] ** -0.5)
    given = [x.double().requires_grad_() for x in (q, k, v, *(extra or ()))]
    expected, sums = reference.neighborhood(
        *given[:3], **options, scale=scale, extra=None if extra is None else tuple(given[3:])
    )
    rule = made(grid, options)
    out, lse = launch.forward(q, k, v, rule, scale, extra, True, form=form)
    bound = reference.TOLERANCE[q.dtype]
    assert (out - expected).abs().max() <= bound * expected.abs().max()
    assert (lse - sums).abs().max() < (1e-2 if GPU else 1e-4)
    # Scores that a bound is known of need no maximum.
    least = (scale * q.double().flatten(0, -2).norm(dim=-1).max() * 8).abs().item()
    bounded, _ = launch.forward(q, k, v, rule, scale, extra, bound=least, form=form)
    assert (bounded - expected).abs().max() <= 2 * bound * expected.abs().max()
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, given, grad.double())
    found = launch.backward(q, k, v, out, lse, grad, rule, scale, extra, (form, form))
    for x, y in zip(found, wanted, strict=False):
        assert x.is_contiguous() and (x - y).abs().max() <= 4 * bound * y.abs().max()


# The interpreter says so of NumPy; the sums are looked at.
@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("factor", [1, 40])
@pytest.mark.parametrize("name", CASES)
def test_weights_without_a_maximum(name, factor):
    """Scores far from zero take one after all."""
    grid, options, form, special = CASES[name]
    q, k, v, extra = tensors(grid, **special)
    given = [x.float() for x in (factor * q, k, v, *(extra or ()))]
    scale = special.get("scale", q.shape[-1] ** -0.5)
    wide = [x.double() for x in given]
    expected, sums = reference.neighborhood(*wide[:3], **options, scale=scale, extra=tuple(wide[3:]) or None)
    # Beyond what float32 holds as it is.
    assert factor == 1 or sums.abs().max() > 100
    setting = launch.Setting(made(grid, options), scale, len(given) > 3, True, (form,), free=True)
    lse = torch.empty(q.shape[:-1], device=q.device)
    out = launch._forward(setting, q.device)(*given[:3], lse, *given[3:])
    assert (out - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert (lse - sums).abs().max() < 1e-3


@pytest.mark.parametrize("grid, window", [((24, 48, 48), 11), ((128, 128), 15), ((32768,), 2048), ((3, 500, 7), 3)])
def test_every_candidate_covers_its_grid(grid, window):
    rule = made(grid, {"window": tuple(min(window, n) for n in grid)})
    heads, kind = 4, torch.bfloat16
    chosen = forms.choose(rule, grid, heads, 64, kind)
    costs = {form: forms.cost(rule, grid, form, heads) for form in forms.candidates(rule, grid, 64, kind)}
    best = min(costs, key=costs.__getitem__)
    assert (chosen.box, chosen.walk) == (best.box, best.walk)
    for form in costs:
        seen = forms.work(rule, grid, form)
        assert seen.boxes * prod(form.box) >= prod(grid)
        # All pairs are visited.
        assert seen.boxes * prod(form.box) * seen.steps * form.step_keys >= rule.pairs(grid)


def test_no_grid_is_compiled_for():
    q = drawn(1, 9, 11, 12, 2, 16, seed=0)
    rule, form = made((9, 11, 12), {"window": 3}), Form((2, 2, 4), 0, 16)

    def arguments(q):
        setting = launch.Setting(rule, 1.0, False, False, (form,))
        grid = tuple(q.shape[1:-2])
        return launch._constants(setting, form, launch._axes(form), grid, q, q, False)

    assert arguments(q) == arguments(q[:, :8, 3:]) == arguments(drawn(1, 30, 20, 40, 2, 16, seed=0))


def test_more_programs_than_a_launch_has():
    with pytest.raises(DeviceError, match="fewer than 2\\*\\*31 boxes"):
        launch._programs(2**31, 1, 1)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [8, 32, 64, 80, 128, 256])
def test_attend_on_a_gpu(kind, dim):
    torch.manual_seed(0)
    for grid, window, options in [
        ((8, 12, 13), 5, {}), ((33, 40), 7, {"dilation": 2}), ((500,), 129, {"causal": True}),
        ((12, 13, 9), (3, 7, 5), {"stride": (1, 2, 1), "border": "cut"}),
    ]:  # fmt: skip
        q, k, v = (torch.randn(2, *grid, 2, dim, device="cuda", dtype=kind, requires_grad=True) for _ in range(3))
        out = tw.neighborhood.attend(q, k, v, window, **options)
        inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected, _ = reference.neighborhood(*inputs, window, **options)
        bound = reference.TOLERANCE[kind]
        assert reference.relative_error(out.detach(), expected.detach()) <= bound
        grad = torch.randn_like(out)
        found, wanted = torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, inputs, grad.double())
        # Rows of gradients may be as good as zero.
        assert all((x - y).norm() <= 2 * bound * y.norm() for x, y in zip(found, wanted, strict=True))


def test_forms_differ_by_name():
    assert Form((4, 4, 4), 0).name != replace(Form((4, 4, 4), 0), run=2).name


@pytest.mark.parametrize(("grid", "window"), [((24, 48, 48), 11), ((50, 40), (15, 3)), ((5000,), 700)])
def test_a_choice_says_its_box_and_the_pairs_of_its_products(grid, window):
    rule = rules.make(len(grid), window, 1, 1, False, "shift")
    found = launch.choose(rule, grid, 4, 4, 64, 64, torch.bfloat16)
    assert found.box == forms.choose(rule, grid, 4, 64, torch.bfloat16).box and found.us is None
    assert rule.pairs(grid) <= found.visited <= 10 * rule.pairs(grid)


def test_a_launch_is_given_each_tensor_once(monkeypatch):
    """Tensors that are given twice are told apart by views, which takes the host longer than the launch."""
    given, call = [], launch.CachedLaunch.__call__
    monkeypatch.setattr(launch.CachedLaunch, "__call__", lambda self, *own: given.append(own) or call(self, *own))
    q, k, v, _ = tensors((4, 4))
    rule, form = made((4, 4), {"window": 3}), Form((4, 4), 0, 16)
    launch.forward(q, k, v, rule, 0.25, form=form)
    out, lse = launch.forward(q, k, v, rule, 0.25, None, True, form=form)
    launch.backward(q, k, v, out, lse, torch.ones_like(out), rule, 0.25, None, (form, form))
    assert len(given) == 4 and all(len(set(map(id, own))) == len(own) for own in given)
