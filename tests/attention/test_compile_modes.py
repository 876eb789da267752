"""Every way in which people compile: plans, packed batches and slices under each mode of ``torch.compile``."""

import itertools

import numpy as np
import pytest
import torch

import tilewright as tw
from helpers import plans
from tilewright.attention.masks import Bias

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
N, H, D = 200, 2, 64
WAYS = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "dynamic": {"dynamic": True},
}
TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-4


def planned(bias=None, **options):
    """A plan some of whose blocks are split."""
    dense = plans.pattern(N, N, n_global=3, empty=0)
    return tw.plan(
        dense, heads=H, head_dim=D, dtype=DTYPE, device=DEVICE, bias=bias, split_keys=64, solver="greedy", **options
    )


def table(entries=31):
    values = torch.linspace(-1, 1, H * entries).view(H, entries)
    return Bias(values, lambda q, k: np.abs(q - k) % entries)


def of_plan():
    return planned()


def of_bias():
    return planned(table())


def of_table():
    plan, values = planned(table()), table().table.to(DEVICE)
    return lambda q, k, v: plan(q, k, v, bias=values * q.float().mean())


def of_heads():
    one, other = (plans.pattern(N, N, seed=seed, empty=0) for seed in (0, 1))
    return tw.plan(np.stack([one, other]), heads=H, head_dim=D, dtype=DTYPE, device=DEVICE, solver="greedy")


def of_module():
    """A layer that plans in its first call, with a table of biases."""
    layer = tw.nn.SparseAttention(H * D, H, "window-5-g0", (10, 20), bias=True).to(DEVICE, DTYPE)
    torch.nn.init.normal_(layer.relative_position_bias_table)
    return lambda q, k, v: layer((q + k + v).transpose(1, 2).flatten(2))


def of_packed():
    keep = torch.arange(N, device=DEVICE) < torch.tensor([[N], [N // 2]], device=DEVICE)

    def call(q, k, v):
        batch = tw.ragged.pack(keep, 2 * N)
        packed = [batch.gather(x.transpose(1, 2).flatten(2)).view(-1, H, D) for x in (q, k, v)]
        return batch.attend(*packed)[: N + N // 2]

    return call


def of_slices():
    return lambda q, k, v: tw.slices.attend(q, k, v, tw.slices.predict(q, k, budget=0.5, keep=0.3))


FORMS = {"plan": of_plan, "bias": of_bias, "table": of_table, "heads": of_heads, "module": of_module}
FORMS |= {"packed": of_packed, "slices": of_slices}


def tensors(seed, batch=2):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, H, N, D, generator=make).to(DEVICE, DTYPE) for _ in range(3)]


def close(found, wanted):
    assert (found.detach().float() - wanted.float()).norm() <= TOLERANCE * wanted.float().norm()


@pytest.fixture(autouse=True)
def compiled_anew(tmp_path, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def counted():
    """What torch counts while it compiles, by names."""
    from torch._dynamo.utils import counters

    counters.clear()
    return counters


# On a CPU, which has no graphs of launches and whose kernels are not tuned, every form once.
ALTERNATING = zip(FORMS, itertools.cycle(["default", "dynamic"]))
CASES = list(itertools.product(FORMS, WAYS) if DEVICE == "cuda" else ALTERNATING)


@pytest.mark.parametrize(("form", "way"), CASES)
def test_a_compiled_call_is_the_plain_one(form, way, counted):
    call = FORMS[form]()
    compiled = torch.compile(lambda q, k, v: call(q * 2, k, v) + 1, fullgraph=True, **WAYS[way])
    with torch.no_grad():
        for seed in range(4):
            given = tensors(seed)
            found = compiled(*given).clone()
            q, k, v = given
            close(found, call(q * 2, k, v) + 1)
    assert not counted["graph_break"] and counted["stats"]["unique_graphs"] == 1
    assert not counted["inductor"]["cudagraph_skips"]


# Slices have no gradient, nor have plans of several patterns on a CPU.
@pytest.mark.parametrize(("form", "way"), [x for x in CASES if x[0] not in ("slices", DEVICE == "cpu" and "heads")])
def test_a_compiled_gradient_is_the_plain_one(form, way, counted):
    call = FORMS[form]()

    def loss(q, k, v):
        return (call(q * 2, k, v).float() ** 2).mean()

    compiled = torch.compile(loss, fullgraph=True, **WAYS[way])
    for seed in range(4):
        leaves = [x.requires_grad_() for x in tensors(seed)]
        found = [x.clone() for x in torch.autograd.grad(compiled(*leaves), leaves)]
        for x, y in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            close(x, y)
    assert not counted["graph_break"] and counted["stats"]["unique_graphs"] == 1
    assert not counted["inductor"]["cudagraph_skips"]


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no graphs of launches")
def test_plans_may_be_made_while_graphs_are_recorded_and_new_batches_compile_nothing(counted):
    # The executor of the second is prepared in the pool of the first one's graph.
    first, second = planned(), planned(table())
    compiled = torch.compile(lambda q, k, v: second(first(q, k, v), k, v), mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for batch in (3, 4, 6, 3):
            given = tensors(batch, batch)
            for _ in range(3):
                found = compiled(*given).clone()
            close(found, second(first(*given), *given[1:]))
    assert counted["stats"]["unique_graphs"] == 1


def test_a_compiled_plan_refuses_other_tensors_in_one_line():
    plan = planned()
    compiled = torch.compile(plan, fullgraph=True)
    q, k, v = tensors(0)
    with torch.no_grad():
        compiled(q, k, v)
        for wrong in ([x[:, :, :-1] for x in (q, k, v)], [x.double() for x in (q, k, v)]):
            with pytest.raises(Exception, match=r"q: expected (shape|dtype)") as error:
                compiled(*wrong)
            assert "PatternError" in repr(error.value) or isinstance(error.value, tw.TilewrightError)


def test_compiled_code_calls_what_runs_without_the_dispatcher():
    from torch._inductor.utils import run_and_get_code

    plan, given = planned(), tensors(0)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(torch.compile(plan, fullgraph=True), *given)
        close(found, plan(*given))
    assert "= torch.ops.tilewright.attend_direct(" in codes[0]
    # Other compilers, and whoever runs a graph by its nodes, call the operator.
    graphs = []
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(plan, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(*given)
    assert torch.ops.tilewright.attend in {
        getattr(node.target, "overloadpacket", node.target) for node in graphs[0].graph.nodes
    }
