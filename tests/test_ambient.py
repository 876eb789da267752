"""Each public operator inside of each state that torch, or the host, may be in: as its own plain call.

A row of `OPERATORS` meets every one of `STATES`.
"""

import copy
import os
import pickle
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from helpers.plans import running
from tilewright import networks, slices
from tilewright.attention.masks import Bias
from tilewright.core.errors import TilewrightError
from tilewright.integrations import sdpa
from tilewright.nn import SparseAttention
from tilewright.packed import pack

N, HEADS, DIM, GRID = 25, 2, 8, (4, 6)
# Of float32 and bfloat16, for results of about 1.
EXACT, ROUGH = 2e-5, 5e-2


@dataclass(frozen=True)
class Operator:
    """make: a new one. run: ``run(it, *inputs)`` gives a tensor. inputs: float tensors of a batch, to be differentiated
    where `gradients`. casts: whether autocast may change its type. other: inputs of another grid. empty: whether a
    batch may be; other people's models reshape what they cannot then."""

    make: object
    run: object
    inputs: object
    gradients: bool = True
    casts: bool = False
    other: object = None
    empty: bool = True


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]), dtype=torch.float32)


def mask():
    return np.random.default_rng(0).random((N, N)) < 0.3 + np.eye(N)


def qkv(batch, n=N, dim=DIM):
    return drawn(3, batch, HEADS, n, dim).unbind(0)


def plan(bias=None, **more):
    made = None if bias is None else bias()
    return tw.plan(mask(), heads=HEADS, head_dim=DIM, solver="greedy", bias=made, **more)


def table():
    return Bias(0.3 * drawn(HEADS, 2 * N), distance)


def distance(rows, cols):
    return np.asarray(rows) - np.asarray(cols) + N


def by_torch(form):
    """A plan of rows that see the same keys, which runs a form of torch's own attention."""
    kept = np.tile(np.random.default_rng(0).random(N) < 0.4, (N, 1))
    return running(tw.plan(kept, heads=HEADS, head_dim=DIM, solver="greedy"), form)


def by_head():
    return tw.plan(np.stack([mask(), mask().T]), heads=HEADS, head_dim=DIM, solver="greedy")


def across():
    return tw.plan(mask()[:, : N - 5], heads=HEADS, head_dim=DIM, solver="greedy")


def packed(_, x):
    keep = torch.arange(N, device="cpu") % 3 > 0
    packing = pack.pack(keep.expand(len(x), N), tokens=x)
    q, k, v = packing.tokens.unflatten(1, (3, HEADS, DIM)).unbind(1)
    return packing.scatter(packing.attend(q, k, v).flatten(1))


def listed(_, q, k, v):
    return slices.attend(q, k, v, slices.predict(q, k, keep=0.5, budget=0.6))


def on_grid(batch):
    """q, and half as many heads of k, v and extra tokens."""
    return *drawn(1, batch, 9, 7, 4, DIM), *drawn(2, batch, 9, 7, 2, DIM), *drawn(2, batch, 3, 2, DIM)


def neighborhood(_, q, k, v, *extra):
    return tw.neighborhood.attend(q, k, v, (3, 5), extra=extra)


def timm():
    module = pytest.importorskip("timm", reason="timm is not installed")
    from tilewright.integrations.timm import sparsify

    torch.manual_seed(0)
    small = {"depth": 2, "embed_dim": 16, "num_heads": HEADS, "num_classes": 3, "dynamic_img_size": True}
    model = module.create_model("vit_tiny_patch16_224", img_size=64, **small).eval()
    sparsify(model, "window-3-g1")
    return model


def transformers():
    module = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    from tilewright.integrations.transformers import use

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 16}
    config = module.Dinov2Config(**small, image_size=64, patch_size=16)
    return use(module.Dinov2Model._from_config(config, attn_implementation="sdpa").eval(), "window-3-g1")


def layer():
    torch.manual_seed(0)
    made = SparseAttention(16, HEADS, "window-3-g1", GRID, bias=True)
    nn.init.normal_(made.relative_position_bias_table)
    return made


def network():
    torch.manual_seed(0)
    return networks.create("vision_longformer", variant="tiny", image_size=32, attention="tilewright").eval()


def pictures(batch):
    return (drawn(batch, 3, 64, 48),)


OPERATORS = {
    "plan": Operator(plan, lambda it, *x: it(*x), qkv),
    "plan in order": Operator(plan, lambda it, *x: it(*x, ordered=True), qkv),
    "plan with a bias": Operator(partial(plan, lambda: drawn(HEADS, N, N)), lambda it, *x: it(*x), qkv),
    "trained table": Operator(
        partial(plan, table),
        lambda it, q, k, v, bias: it(q, k, v, bias=bias),
        lambda batch: (*qkv(batch), 0.5 * drawn(HEADS, 2 * N)),
    ),
    "plan by torch, masked": Operator(partial(by_torch, "masked"), lambda it, *x: it(*x), qkv),
    "plan by torch, compacted": Operator(partial(by_torch, "compacted"), lambda it, *x: it(*x), qkv),
    "plan by head": Operator(by_head, lambda it, *x: it(*x), qkv),
    "plan across": Operator(
        across, lambda it, *x: it(*x), lambda batch: (qkv(batch)[0], *drawn(2, batch, HEADS, N - 5, DIM))
    ),
    "packed batch": Operator(lambda: None, packed, lambda batch: (drawn(batch, N, 3 * HEADS * DIM),)),
    "slices": Operator(lambda: None, listed, lambda batch: qkv(batch, 130, 64), gradients=False),
    "neighborhood": Operator(lambda: None, neighborhood, on_grid, casts=True),
    "neighborhood plan": Operator(
        lambda: tw.neighborhood.plan((9, 7), (3, 2), heads=4, head_dim=DIM, kv_heads=2, dilation=(2, 1)),
        lambda it, q, k, v: it(q, k, v),
        lambda batch: on_grid(batch)[:3],
    ),
    "sdpa": Operator(
        lambda: sdpa.Slices(tokens=1, keep=0.5, budget=0.6),
        lambda it, *x: it(*x),
        lambda batch: qkv(batch, 130, 64),
        False,
        True,
    ),
    "layer": Operator(
        layer,
        lambda it, x, **more: it(x, **more),
        lambda batch: (drawn(batch, N, 16),),
        casts=True,
    ),
    "timm": Operator(
        timm, lambda it, x: it(x), pictures, casts=True, other=lambda: (drawn(2, 3, 48, 64),), empty=False
    ),
    "transformers": Operator(
        transformers,
        lambda it, x: it(x).last_hidden_state,
        pictures,
        casts=True,
        other=lambda: (drawn(2, 3, 48, 64),),
        empty=False,
    ),
    "network": Operator(network, lambda it, x: it(x), lambda batch: (drawn(batch, 3, 32, 32),), casts=True),
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


def forgotten():
    """Nothing is prepared: what comes next is the first call."""
    from tilewright.nn import attention

    attention._SITES.clear()


def result(operator, it, inputs, run=None):
    with torch.no_grad():
        return (run or operator.run)(it, *inputs).clone()


def gradients(operator, it, inputs, run=None):
    """The result and, of its sum of squares, the gradients of inputs and of a module's parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    parameters = list(it.parameters()) if isinstance(it, nn.Module) else []
    for x in parameters:
        x.grad = None
    out = (run or operator.run)(it, *leaves)
    out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves), *(x.grad for x in parameters if x.grad is not None)]


@cache
def plain(name, batch=2):
    operator = OPERATORS[name]
    return result(operator, operator.make(), operator.inputs(batch))


@cache
def plain_gradients(name):
    operator = OPERATORS[name]
    return gradients(operator, operator.make(), operator.inputs(2))


def close(found, wanted, tolerance=EXACT):
    assert found.shape == wanted.shape and not found.isnan().any()
    assert (found.float() - wanted.float()).abs().max() <= tolerance * max(1, wanted.abs().max())


def all_close(found, wanted, tolerance=EXACT):
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        close(x, y, tolerance)


def trains(name, it, tolerance=EXACT):
    if OPERATORS[name].gradients:
        all_close(gradients(OPERATORS[name], it, OPERATORS[name].inputs(2)), plain_gradients(name), tolerance)


def threads(name):
    operator = OPERATORS[name]
    it, wanted = operator.make(), [plain(name, batch) for batch in (1, 2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda i: result(operator, it, operator.inputs(1 + i % 2)), range(8)))
    finally:
        sys.setswitchinterval(interval)
    for i, out in enumerate(found):
        close(out, wanted[i % 2])


def inference_then_training(name):
    operator = OPERATORS[name]
    forgotten()
    it = operator.make()
    with torch.inference_mode():
        close(operator.run(it, *operator.inputs(2)), plain(name))
    trains(name, it)


def autocast(name):
    operator = OPERATORS[name]
    it, tolerance = operator.make(), ROUGH if operator.casts else EXACT
    with torch.autocast("cpu", torch.bfloat16):
        found = result(operator, it, operator.inputs(2))
        if operator.gradients:
            tensors = gradients(operator, it, operator.inputs(2))
    close(found, plain(name), tolerance)
    if operator.gradients and not operator.casts:
        all_close(tensors, plain_gradients(name))
    trains(name, it)


def inside(context, name):
    operator = OPERATORS[name]
    it, inputs = operator.make(), operator.inputs(2)
    forgotten()
    wanted = plain(name), operator.gradients and plain_gradients(name)
    with context():
        close(result(operator, it, inputs), wanted[0])
        if operator.gradients and torch.is_grad_enabled():
            all_close(gradients(operator, it, inputs), wanted[1])


class DefaultType:
    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


def transformed(name):
    """Right, or one clear error."""
    operator = OPERATORS[name]
    it, inputs = operator.make(), operator.inputs(2)
    operator.run(it, *inputs)

    def square(*x):
        return operator.run(it, *x).float().square().sum()

    def jvp():
        tangents = tuple(map(torch.ones_like, inputs))
        found = torch.func.jvp(square, inputs, tangents)[1]
        return found, sum(x.sum() for x in plain_gradients(name)[1 : 1 + len(inputs)])

    def grad():
        found = torch.func.grad(square, tuple(range(len(inputs))))(*inputs)
        return torch.cat([x.flatten() for x in found]), torch.cat(
            [x.flatten() for x in plain_gradients(name)[1 : 1 + len(inputs)]]
        )

    def vmap():
        dims = tuple(0 if len(x) == 2 and x.ndim > 2 else None for x in inputs)
        given = [x if at is None else x[:, None] for x, at in zip(inputs, dims, strict=True)]
        return torch.func.vmap(partial(operator.run, it), dims)(*given)[:, 0], plain(name)

    for way in (jvp, grad, vmap) if operator.gradients else (vmap,):
        try:
            found, wanted = way()
        except TilewrightError as error:
            assert "\n" not in str(error)
        else:
            close(found, wanted, 1e-4)


def checkpointed(name):
    operator = OPERATORS[name]
    for reentrant in (False, True) if operator.gradients else ():

        def again(it, *inputs, reentrant=reentrant):
            return checkpoint(partial(operator.run, it), *inputs, use_reentrant=reentrant)

        found = gradients(operator, operator.make(), operator.inputs(2), again)
        all_close(found, plain_gradients(name))


def copied(name, how):
    operator = OPERATORS[name]
    it = operator.make()
    for _ in range(2):
        try:
            other = how(it)
        except TilewrightError as error:
            assert "state_dict" in str(error)
            return
        close(result(operator, other, operator.inputs(2)), plain(name))
        trains(name, other)


def forked(name):
    operator = OPERATORS[name]
    it, inputs = operator.make(), operator.inputs(2)
    close(result(operator, it, inputs), plain(name))
    child = os.fork()
    if not child:
        signal.alarm(60)
        torch.set_num_threads(1)
        os._exit(not torch.allclose(result(operator, it, inputs), plain(name), atol=EXACT))
    assert os.waitpid(child, 0)[1] == 0


def batches(name):
    operator = OPERATORS[name]
    it = operator.make()
    for batch in (1, 3, 1):
        inputs = operator.inputs(batch)
        found = result(operator, it, inputs)
        each = [result(operator, it, [x[i : i + 1] if len(x) == batch else x for x in inputs]) for i in range(batch)]
        close(found, torch.cat(each))
    if not operator.empty:
        return
    try:
        found = result(operator, it, operator.inputs(0))
    except TilewrightError as error:
        assert "\n" not in str(error)
    else:
        assert len(found) == 0 and found.shape[1:] == plain(name).shape[1:]


def strided(name):
    operator = OPERATORS[name]
    it = operator.make()
    for at in (0, -2):
        inputs = [torch.stack((x, x.neg()), at).movedim(at, 0)[0] for x in operator.inputs(2)]
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 3 and at else x for x in inputs]
        close(result(operator, it, inputs), plain(name))
        if operator.gradients:
            all_close(gradients(operator, it, inputs), plain_gradients(name))


def another_grid(name):
    operator = OPERATORS[name]
    if operator.other is None:
        return
    it, others = operator.make(), operator.other()
    wanted = result(operator, operator.make(), others)
    close(result(operator, it, operator.inputs(2)), plain(name))
    close(result(operator, it, others), wanted)
    trains(name, it)


def written(name):
    """What was called is called again with other values in the same memory, or by `functional_call`."""
    operator = OPERATORS[name]
    it, inputs = operator.make(), [x.clone() for x in operator.inputs(2)]
    whole, called = Whole(operator, it), Whole(operator, operator.make())
    for each in (whole, called):
        result(operator, each.it, inputs)
    for x in (*inputs, *whole.parameters()):
        x.data.mul_(0.5)
    other = Whole(operator, operator.make())
    other.load_state_dict(whole.state_dict())
    wanted = result(operator, other.it, inputs)
    close(result(operator, it, inputs), wanted)
    with torch.no_grad():
        close(torch.func.functional_call(called, dict(whole.named_parameters()), tuple(inputs)), wanted)


class Whole(nn.Module):
    """An operator as a module, whatever it is."""

    def __init__(self, operator, it):
        super().__init__()
        self.operator, self.it = operator, it

    def forward(self, *inputs):
        return self.operator.run(self.it, *inputs)


def in_place(name):
    """A result that was made under no_grad is written to outside. Modules end with operators of torch, that may not."""
    operator = OPERATORS[name]
    it, weight = operator.make(), torch.full((1,), 2.0, requires_grad=True)
    if isinstance(it, nn.Module):
        return
    with torch.no_grad():
        out = operator.run(it, *operator.inputs(2))
    out.mul_(weight).sum().backward()
    close(out, 2 * plain(name))
    close(weight.grad, plain(name).sum()[None], 1e-4)


STATES = {
    "written to": written,
    "in place": in_place,
    "threads": threads,
    "inference mode, then training": inference_then_training,
    "no_grad": partial(inside, torch.no_grad),
    "autocast": autocast,
    "default type float64": partial(inside, partial(DefaultType, torch.float64)),
    "default type bfloat16": partial(inside, partial(DefaultType, torch.bfloat16)),
    "default type float16": partial(inside, partial(DefaultType, torch.float16)),
    "default device meta": partial(inside, partial(torch.device, "meta")),
    "torch.func": transformed,
    "checkpointing": checkpointed,
    "deep copy": partial(copied, how=copy.deepcopy),
    "pickle": partial(copied, how=lambda it: pickle.loads(pickle.dumps(it))),
    "fork": forked,
    "another grid": another_grid,
    "batches": batches,
    "strides": strided,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_in_a_state_is_its_own_plain_call(name, state):
    STATES[state](name)
