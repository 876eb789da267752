"""Calls like one before: launched on at once, from three tensors or from the one that holds all three."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from helpers import plans
from helpers.direct import at_address
from helpers.gpu import TRITON_DEVICE
from tilewright import reference
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.core.errors import PatternError
from tilewright.devices import qkv
from tilewright.devices.cuda import launcher

H, D, N = 2, 16, 48
# The stream that is current, where there is no GPU.
HERE = SimpleNamespace(stream=0)
DTYPE = torch.float16 if TRITON_DEVICE == "cuda" else torch.float32


def direct(launched):
    """`Launch.direct` by the interpreter on addresses, where there is no GPU."""

    def made(launch, compiled, *tensors):
        def run(*addresses):
            launched.append(addresses)
            launch(
                *(at_address(at, x).as_strided(x.shape, x.stride()) for at, x in zip(addresses, tensors, strict=True))
            )

        return run

    return made


@pytest.fixture(params=("plain", "empty", "bias"))
def planned(request, monkeypatch):
    """``(plan, mask, bias, launched)``: a plan that runs tiles of a GPU, wherever it is."""
    launched: list = []
    if TRITON_DEVICE == "cpu":
        monkeypatch.setattr(cuda_executor.Launch, "direct", direct(launched))
        monkeypatch.setattr(launcher, "current_stream", lambda _: lambda: HERE.stream)
    mask = plans.pattern(N, N, n_global=2, empty=2 if request.param == "empty" else 0)
    bias = torch.randn(H, N, N) if request.param == "bias" else None
    options = {"heads": H, "head_dim": D, "dtype": DTYPE}
    plan = tw.plan(mask, **options, device=TRITON_DEVICE, solver="greedy", tiles=("16x1",), bias=bias)
    if TRITON_DEVICE == "cpu":
        order = {"row_order": plan.graph.row_order, "col_order": plan.graph.col_order}
        own = {"bias": plan.bias, "ordered": False, "device": TRITON_DEVICE}
        made = cuda_executor.prepare(plan.schedule, plan.blocks, **options, **order, **own)
        monkeypatch.setattr(plan, "_prepare", lambda *_, **__: made)
    return plan, torch.from_numpy(mask), bias, launched


def tokens(batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, N, 3 * H * D, generator=generator).to(TRITON_DEVICE, DTYPE)


def expected(x, mask, bias):
    out = reference.attention(*(each.cpu() for each in qkv.split(x, H)), mask, bias=bias)
    return out.transpose(1, 2).flatten(2)


def near(found, wanted):
    return reference.relative_error(found.detach().cpu(), wanted) <= reference.TOLERANCE[DTYPE]


@pytest.mark.parametrize("joint", (True, False))
def test_a_call_like_one_before_launches_at_once(planned, joint, monkeypatch):
    plan, mask, bias, launched = planned
    call = plan.of_projection if joint else lambda x: plan(*qkv.split(x, H)).transpose(1, 2).flatten(2)
    for batch in (2, 1, 2, 1):
        call(tokens(batch))
    launched.clear()
    for name in ("_executor", "run"):
        monkeypatch.setattr(plan, name, None)
    if joint:
        monkeypatch.setattr(qkv, "split", None)
    x = tokens(seed=2)
    found = call(x)
    other = call(tokens(2)) if joint else None
    monkeypatch.undo()
    assert other is None or near(other, expected(tokens(2), mask, bias))
    assert near(found, expected(x, mask, bias)) and found.is_contiguous()
    if TRITON_DEVICE == "cpu":
        step = H * D * x.itemsize
        ((*at, out), *_) = [each[:4] for each in launched]
        assert at == [x.data_ptr() + i * step for i in range(3)] and out == found.data_ptr()


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_looks_sees_the_operator(planned):
    plan, mask, bias, _ = planned
    x = tokens()
    for _ in range(2):
        plan.of_projection(x), plan(*qkv.split(x, H))
    wanted = expected(x, mask, bias)
    for call in (plan.of_projection, lambda x: plan(*qkv.split(x, H)).transpose(1, 2).flatten(2)):
        with Seeing() as mode:
            assert near(call(x), wanted)
        assert "tilewright::attend" in mode.seen
        assert near(torch.vmap(call)(x[None])[0], wanted)
        with torch.autocast(x.device.type, enabled=False), torch.inference_mode():
            assert near(call(x.clone()), wanted)
        with pytest.raises(PatternError, match="forward-mode"):
            torch.func.jvp(call, (x,), (x,))
        with pytest.raises(PatternError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
            call(torch.autograd.forward_ad.make_dual(x, x))


def test_other_tensors_go_the_usual_way(planned, monkeypatch):
    plan, mask, bias, launched = planned
    x = tokens()
    for _ in range(2):
        plan.of_projection(x)
    beside = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    launched.clear()
    for other in (beside, tokens(2)):
        assert near(plan.of_projection(other), expected(other, mask, bias))
    assert not launched
    for other in (x.mT.contiguous().mT, tokens(3)):
        assert near(plan.of_projection(other), expected(other, mask, bias))
    given = x.clone().requires_grad_()
    assert plan.of_projection(given).requires_grad
    with torch.no_grad():
        assert not plan.of_projection(given).requires_grad
    plan.of_projection(x), launched.clear()
    monkeypatch.setattr(HERE, "stream", 1)
    assert near(plan.of_projection(x), expected(x, mask, bias))
    assert not launched
    for wrong in (None, x[0], x[..., :-1], x.cpu().numpy()):
        with pytest.raises(PatternError, match="expected a tensor"):
            plan.of_projection(wrong)
    with pytest.raises(PatternError):
        plan.of_projection(x[:, :-1])
