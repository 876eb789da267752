"""Predictions that were taken down and made again: without a GPU, what would be launched runs under the interpreter."""

import pytest
import torch

from helpers.direct import Kernel
from helpers.gpu import TRITON_DEVICE
from helpers.slices import qkv, tokens
from tilewright import slices
from tilewright.core import _internals
from tilewright.core.errors import ConfigError
from tilewright.devices.cuda import tape
from tilewright.devices.cuda.launcher import CachedLaunch, lasting
from tilewright.slices import operators, prediction, selection
from tilewright.slices.cuda import code_kernels, kernels, selection_kernels

DEVICE = torch.device(TRITON_DEVICE, 0) if TRITON_DEVICE == "cuda" else torch.device("cpu")
DTYPE = torch.bfloat16 if TRITON_DEVICE == "cuda" else torch.float16
STATED = {
    "pooled": {"mass": 0.8, "pool": 32},
    "pools": {"keep": 0.3, "pool": 8},
    "column": {"by": "column", "keep": 0.2, "sample": 4},
    "blocks": {"by": "blocks", "mass": 0.8, "block": 16, "always": [(0, 7)]},
    "random": {"by": "random", "threshold": 0.01, "width": 16},
    "text": {"mass": 0.8, "text": (8, 12)},
}
# Of every prediction here.
COMMON = {"budget": 1.0, "rows": 32, "least": 2}


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched directly, where there is no GPU."""
    found = []
    if DEVICE.type != "cuda":
        for module in (code_kernels, kernels, selection_kernels):
            for name in filter(lambda name: name.startswith("tilewright_"), dir(module)):
                monkeypatch.setattr(module, name, Kernel(getattr(module, name), found))
        monkeypatch.setattr(_internals, "triton_launcher", lambda compiled, *_: (compiled.launch, (), False))
        monkeypatch.setitem(operators.EXECUTORS, "cpu", "tilewright.slices.cuda.executor")
        monkeypatch.setitem(prediction.SELECTIONS, "cpu", "tilewright.slices.cuda.selection")
    forget()
    yield found
    forget()


def forget():
    for cache in (operators.executor, prediction._selection, prediction._recorder, prediction._planned):
        cache.cache_clear()
    prediction._REPLAYS = prediction.Recent(256, 8)


def replayed():
    """How many calls were taken down."""
    return sum(len(calls) for _, calls in prediction._REPLAYS.items())


def inputs(seed, batch=2):
    return qkv(batch, 2, 75, 90, 64, seed=seed, dtype=DTYPE, device=DEVICE)[:2]


def same_lists(one, other):
    assert torch.equal(one.counts, other.counts) and torch.equal(one.order, other.order)
    assert torch.equal(one.state, other.state) and one.layout == other.layout
    listed = torch.arange(one.keys.shape[-1], device=one.keys.device) < one.counts[..., None]
    assert torch.equal(one.keys[listed], other.keys[listed])


@pytest.mark.parametrize("name, parts", [*((name, 1) for name in STATED), ("pools", 3), ("text", 3)])
def test_predictions_made_again_are_those_of_a_first_call(name, parts, launched, monkeypatch):
    if parts > 1:
        monkeypatch.setattr(selection, "WORKSPACE", 900)
    given = COMMON | STATED[name]
    if name == "text":
        given["lengths"] = torch.tensor([77, 90], dtype=torch.int32, device=DEVICE)
    slices.predict(*inputs(1), **given)
    assert replayed() == 1
    for seed in (5, 6) if name == "text" else (5,):
        q, k = inputs(seed)
        if name == "text":
            given["lengths"] = given["lengths"].flip(0)
        launched.clear()
        again = slices.predict(q, k, **given)
        assert replayed() == 1 and (launched or DEVICE.type == "cuda")
        prediction._REPLAYS = prediction.Recent(256, 8)
        right = slices.predict(q, k, **given)
        right.check()
        same_lists(again, right)
        assert again.lengths is right.lengths or torch.equal(again.lengths, right.lengths)


def test_queries_and_keys_of_one_projection(launched):
    made = [tokens(1, 75, 3, 2, 64, seed=seed, dtype=DTYPE, device=DEVICE) for seed in (1, 2)]
    fused = [x.permute(2, 0, 3, 1, 4).unbind(0)[:2] for x in made]
    slices.predict(*fused[0], keep=0.2, **COMMON)
    # Of one projection again, and of two.
    for q, k in (fused[1], (fused[0][0], fused[1][1])):
        launched.clear()
        again = slices.predict(q, k, keep=0.2, **COMMON)
        assert replayed() == 1 and (launched or DEVICE.type == "cuda")
        same_lists(again, slices.predict(q.contiguous(), k.contiguous(), keep=0.2, **COMMON))
        prediction._REPLAYS = prediction.Recent(256, 8)
        slices.predict(*fused[0], keep=0.2, **COMMON)


def test_tensors_of_other_layouts_are_not_mistaken(launched):
    given = {"keep": 0.2} | COMMON
    slices.predict(*inputs(1), **given)
    for q, k in (
        inputs(2, batch=1),
        [x.contiguous() for x in inputs(2)],
        [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in inputs(2)],
        [inputs(2)[0], inputs(2)[1][:, :1].expand(2, 2, 90, 64)],
    ):
        lists = slices.predict(q, k, **given)
        prediction._REPLAYS = prediction.Recent(256, 8)
        same_lists(lists, slices.predict(q.clone().contiguous(), k.clone().contiguous(), **given))
        prediction._REPLAYS = prediction.Recent(256, 8)
        slices.predict(*inputs(1), **given)


def test_given_lists_and_numbers_are_not_taken_down(launched):
    q, k = inputs(1)
    lse = (q.float() @ k.float().mT * 0.125).logsumexp(-1)
    slices.predict(q, k, by="column", keep=0.2, lse=lse, **COMMON)
    slices.predict(q, k, by="given", mask=lambda b, h, i, j: i >= j, budget=1, rows=32)
    assert replayed() == 0
    # Settings that no dict takes are refused as ever.
    with pytest.raises(ConfigError, match="pool"):
        slices.predict(q, k, keep=0.2, pool=[1, 2], **COMMON)


def test_queries_that_are_keys_too_are_taken_down(launched):
    given = {"keep": 0.2, **COMMON}
    q, _ = inputs(1)
    wanted = slices.predict(q, q.clone(), **given)
    for _ in range(2):
        same_lists(slices.predict(q, q, **given), wanted)
    # The clone's call and the one whose tensors are the same.
    assert replayed() == 2


def test_as_many_calls_as_stated_are_kept(launched, monkeypatch):
    monkeypatch.setattr(prediction, "_REPLAYS", prediction.Recent(2, 8))
    for keep in (0.1, 0.2, 0.3):
        slices.predict(*inputs(1), keep=keep, **COMMON)
    assert replayed() == 2


def test_what_lasts_is_told_to_a_tape_alone():
    x = torch.zeros(4)
    assert lasting(x) is x
    with tape.Tape(torch.device("cpu")).running() as running:
        lasting(x)
    assert list(running._kept.values()) == [x]


def test_launches_that_cannot_be_made_directly_are_not_taken_down(monkeypatch):
    monkeypatch.setattr(_internals, "triton_launcher", lambda *_: None)
    call = CachedLaunch(lambda x: (torch.empty(4), None, 1, ()), torch.device("cpu"))

    def made(running, x):
        out = call(x)
        running.settle(out)
        return out

    out, replay = tape.recorded(torch.device("cpu"), made, torch.zeros(4))
    assert out.shape == (4,) and replay is None
