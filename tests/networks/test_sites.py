"""Sites of the networks: every attention against the oracle, orders, clocks, biases that change, plans kept on disk."""

import copy
import logging
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tilewright import networks, reference
from tilewright.attention import backends
from tilewright.attention import plan as api
from tilewright.core.errors import ConfigError, PatternError, TileError, UnknownNameError
from tilewright.networks import Plans, attention_sites
from tilewright.networks._sliding_chunks import Windows
from tilewright.networks.attentions import dense, tilewright
from tilewright.torch_attention import flex
from tilewright_study.measure import clock as clocks

HEADS, DIM = 2, 16
WINDOWS = Windows(grid=(7, 7), n_global=1, radius=2, mode="chunk")
TOKENS = 50


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def site(attention):
    return attention_sites.Site(attention, WINDOWS.graph, HEADS, DIM, WINDOWS.attend, WINDOWS.bias_index)


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, TOKENS, DIM, generator=generator).to(dtype) for _ in range(3)]


def drawn_bias(seed=1):
    bias = torch.randn(HEADS, 7 * 7 + 4, generator=torch.Generator().manual_seed(seed))
    bias[:, -1] = 0
    return bias


def oracle(q, k, v, bias=None):
    at = torch.arange(TOKENS)
    spelt = None if bias is None else bias[:, WINDOWS.bias_index(at[:, None], at)]
    return reference.attention(q, k, v, torch.from_numpy(WINDOWS.graph().to_dense()), bias=spelt)


def attended(attend, at, q, k, v, bias=None, tables=None):
    """Put tokens in the site's order, attend, and undo the order."""
    order = torch.arange(TOKENS) if at.order is None else at.order
    out = attend(*(x[:, :, order] for x in (q, k, v)), bias, tables)
    return out[:, :, torch.argsort(order)]


@pytest.mark.parametrize("bias", [None, drawn_bias()], ids=["plain", "bias"])
@pytest.mark.parametrize("attention", ["dense", "native", "tilewright"])
def test_every_attention_gives_the_oracles_result(attention, bias):
    at = site(attention)
    out = attended(at.layer(), at, *tensors(), bias)
    torch.testing.assert_close(out.double(), oracle(*tensors(), bias), atol=2e-5, rtol=0)


class Biased(torch.nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at, self.attend, self.table = at, at.layer(), torch.nn.Parameter(drawn_bias())

    def forward(self, q, k, v):
        return attended(self.attend, self.at, q, k, v, lambda: 2 * self.table, (self.table,))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["dense", "native", "tilewright"])
def test_every_attention_is_exported_with_its_bias(attention):
    layer = Biased(site(attention))
    layer(*tensors())
    program = torch.export.export(layer, tuple(tensors())).module()
    out = program(*tensors(2))
    torch.testing.assert_close(out.double(), oracle(*tensors(2), 2 * drawn_bias()), atol=2e-5, rtol=0)


def test_flex_gives_the_oracles_result_to_layers_that_ask_for_gradients(monkeypatch):
    monkeypatch.setattr(flex, "UNTUNED", ("32-split",))
    at = site("flex")
    q, k, v = tensors()
    out = attended(at.layer(), at, q.requires_grad_(), k, v, drawn_bias())
    torch.testing.assert_close(out.double(), oracle(q.detach(), k, v, drawn_bias()), atol=2e-5, rtol=0)
    assert not out.is_inference() and not out.requires_grad


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention as it is written down in torch."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex, "need_compiler", lambda device: None)


@pytest.mark.parametrize("bias", [None, drawn_bias()], ids=["plain", "bias"])
def test_every_form_of_flex_gives_the_oracles_result(monkeypatch, uncompiled, bias):
    for variant in flex.UNTUNED:
        monkeypatch.setattr(flex, "UNTUNED", (variant,))
        at = site("flex")
        out = attended(at.layer(), at, *tensors(), bias)
        torch.testing.assert_close(out.double(), oracle(*tensors(), bias), atol=2e-5, rtol=0)


def test_layers_of_a_site_choose_a_form_of_flex_once(monkeypatch, uncompiled):
    asked = []

    def fastest(form, variants, q, k, v):
        asked.append((variants, q.shape[0]))
        return "16" if len(q) == 1 else "32-split"

    monkeypatch.setattr(flex, "fastest", fastest)
    at = site("flex")
    for attend in (at.layer(), at.layer()):
        for images in (1, 2, 1):
            q, k, v = (x[:images] for x in tensors())
            out = attended(attend, at, q, k, v)
            torch.testing.assert_close(out.double(), oracle(q, k, v), atol=2e-5, rtol=0)
    assert asked == [(flex.UNTUNED, 1), (flex.UNTUNED, 2)]


@pytest.mark.parametrize("attention", ["dense", "native", "tilewright"])
def test_queries_keys_values_and_biases_have_gradients(attention):
    at, grad = site(attention), torch.randn(2, HEADS, TOKENS, DIM)
    given = [x.requires_grad_() for x in (*tensors(), drawn_bias())]
    out = oracle(*given)
    wanted = torch.autograd.grad(out, given, grad.double())
    layer = at.layer()
    for _ in range(2):
        found = torch.autograd.grad(attended(layer, at, *given), given, grad)
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm()


def test_scheduled_layers_attend_and_refuse_a_backward_where_there_is_none(monkeypatch):
    monkeypatch.setattr(backends, "differentiates", lambda kind: False)
    at = site("tilewright")
    q, k, v = tensors()
    out = attended(at.layer(), at, q.requires_grad_(), k, v, None)
    torch.testing.assert_close(out.detach().double(), oracle(q.detach(), k, v, None), atol=2e-5, rtol=0)
    with pytest.raises(PatternError, match="no backward: train with attention='dense'"):
        out.sum().backward()


def test_flex_compiles_more_patterns_than_torch_does_by_itself(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "UNTUNED", ("128",))
    torch._dynamo.reset()
    compiled = torch._dynamo.utils.counters["stats"]
    before = compiled["unique_graphs"]
    for side in range(4, 14):
        windows = Windows((side, side), 1, 2, "chunk")
        at = attention_sites.Site("flex", windows.graph, 1, DIM, windows.attend)
        at.layer()(*torch.randn(3, 1, 1, 1 + side * side, DIM))
    assert compiled["unique_graphs"] - before == 10 > torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("bias", [None, drawn_bias], ids=["plain", "bias"])
def test_layers_of_a_site_share_what_flex_has_compiled(monkeypatch, bias):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "UNTUNED", ("64", "64-split"))
    torch._dynamo.reset()
    compiled = torch._dynamo.utils.counters["stats"]
    before, at = compiled["unique_graphs"], site("flex")
    for seed in range(3):
        at.layer()(*tensors(seed), bias and bias(seed))
    assert compiled["unique_graphs"] - before == 1


def test_dense_makes_large_masks_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(dense, "MASK_BYTES", 9 * HEADS * TOKENS * 4)
    made = []
    mask = dense._mask
    monkeypatch.setattr(dense, "_mask", lambda *a: made.append(a[2:4]) or mask(*a))
    out = site("dense").layer()(*tensors(), drawn_bias())
    torch.testing.assert_close(out.double(), oracle(*tensors(), drawn_bias()), atol=2e-5, rtol=0)
    assert made == [(lo, min(lo + 9, TOKENS)) for lo in range(0, TOKENS, 9)]


def test_dense_keeps_a_mask_that_takes_several_calls(monkeypatch):
    monkeypatch.setattr(dense, "MASK_ENTRIES", 30 * HEADS * TOKENS)
    made = []
    mask = dense._mask
    monkeypatch.setattr(dense, "_mask", lambda *a: made.append(a[2:4]) or mask(*a))
    attend, bias = site("dense").layer(), drawn_bias()
    for _ in range(2):
        out = attend(*tensors(), bias)
        torch.testing.assert_close(out.double(), oracle(*tensors(), drawn_bias()), atol=2e-5, rtol=0)
    assert made == [(0, 30), (30, TOKENS)]


@pytest.mark.parametrize("attention", ["dense", "tilewright"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_layer_follows_the_dtype(attention, dtype):
    at = site(attention)
    attend = at.layer()
    attended(attend, at, *tensors(), drawn_bias())
    out = attended(attend, at, *tensors(dtype=dtype), drawn_bias().to(dtype))
    assert out.dtype == dtype
    expected = oracle(*tensors(dtype=dtype), drawn_bias().to(dtype).double())
    assert reference.relative_error(out, expected) <= reference.TOLERANCE[dtype]


@pytest.mark.parametrize("attention", ["dense", "native", "tilewright"])
def test_a_bias_that_was_written_to_is_prepared_again(attention):
    at, bias = site(attention), drawn_bias()
    attend = at.layer()
    attended(attend, at, *tensors(), bias)
    bias.mul_(2)
    torch.testing.assert_close(
        attended(attend, at, *tensors(), bias).double(), oracle(*tensors(), bias), atol=2e-5, rtol=0
    )


def _step(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


def _replace(layer):
    layer.weight.data = 2 * layer.weight.data


def _average(layer):
    """As teachers that are running means do."""
    layer.weight.data.mul_(0.5).add_(torch.randn_like(layer.weight))


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda layer: layer.load_state_dict({"weight": 2 * layer.weight.detach()}), id="load"),
        pytest.param(lambda layer: layer.load_state_dict({"weight": 2 * layer.weight}, assign=True), id="assign"),
        pytest.param(_step, id="step"),
        pytest.param(_replace, id="data"),
        pytest.param(_average, id="average"),
        pytest.param(lambda layer: layer.weight.detach().numpy().__imul__(2), id="numpy"),
        pytest.param(lambda layer: layer.double(), id="dtype"),
    ],
)
@pytest.mark.parametrize("attention", ["dense", "native", "tilewright"])
@torch.no_grad()
def test_a_learned_bias_is_made_once_and_again_when_it_was_written_to(attention, write):
    at, layer, made = site(attention), torch.nn.Linear(7 * 7 + 4, HEADS, bias=False), []
    attend = at.layer()

    def bias():
        made.append(layer.weight)
        return layer.weight * (torch.arange(7 * 7 + 4) < 7 * 7 + 3)

    for times in (1, 2):
        for _ in range(3):
            found = attended(attend, at, *tensors(), bias, list(layer.parameters()))
            assert len(made) == times
        wanted = layer.weight.detach().double()
        wanted[:, -1] = 0
        torch.testing.assert_close(found.double(), oracle(*tensors(), wanted), atol=2e-5, rtol=0)
        write(layer)


@pytest.mark.parametrize("family", ["vision_longformer", "regionvit"])
@pytest.mark.parametrize("attention", ["native", "dense", "tilewright"])
def test_no_value_is_compared_where_a_device_would_be_waited_for(monkeypatch, family, attention):
    """A look at values would wait for a GPU once a layer, which the published code does not."""
    monkeypatch.setattr(attention_sites, "compared", lambda device: False)
    # Here a plan compares the values that a call gives; on a GPU it reads them where they are.
    monkeypatch.setattr(backends.executor("cpu"), "READS_TABLES", True, raising=False)
    options = {"position": "relative"} if family == "vision_longformer" else {}
    network = networks.create(family, variant="tiny", image_size=32, attention=attention, **options)
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        first = network(images)
        for name in ("equal", "allclose"):
            monkeypatch.setattr(torch, name, None)
        again = network(images)
        tables = [table for name, table in network.named_parameters() if "relative" in name or "rel_pos" in name]
        for table in tables:
            table.data.mul_(-3).add_(1)
        # What raises no version is seen by members that are no baselines.
        found = again if attention == "dense" else network(images)
    monkeypatch.undo()
    assert tables and torch.equal(first, again)
    if attention != "dense":
        with torch.inference_mode():
            wanted = copy.deepcopy(network)(images)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        assert not torch.equal(found, first)


@torch.no_grad()
def test_a_network_follows_its_biases():
    """One that is loaded after a call, as one that never knew another bias."""
    create = partial(networks.create, "regionvit", variant="tiny", image_size=32)
    network, other, images = create(attention="tilewright"), create(seed=1), torch.randn(1, 3, 32, 32)
    for module in other.modules():
        if hasattr(module, "rel_pos"):
            module.rel_pos.normal_()
    network(images)
    network.load_state_dict(other.state_dict())
    torch.testing.assert_close(network(images), other(images), atol=1e-4, rtol=0)


def test_an_equal_bias_is_prepared_once(monkeypatch):
    prepared = []
    prepare = dense.prepare
    monkeypatch.setattr(dense, "prepare", lambda *a: prepared.append(a) or prepare(*a))
    attend = site("dense").layer()
    with torch.inference_mode():
        for _ in range(3):
            attend(*tensors(), drawn_bias())
    assert len(prepared) == 1
    attend(*tensors())
    assert len(prepared) == 2


@pytest.mark.parametrize("attention", ["tilewright", "flex"])
def test_tokens_enter_in_plan_order_and_leave_in_their_own(attention):
    at = site(attention)
    x = torch.randn(3, TOKENS, 5)
    assert not torch.equal(at.enter(x), x)
    torch.testing.assert_close(at.enter(x), x[:, at.order])
    assert torch.equal(at.leave(at.enter(x)), x)


@pytest.mark.parametrize("attention", ["dense", "native"])
def test_other_attentions_keep_the_models_order(attention):
    at, x = site(attention), torch.randn(3, TOKENS, 5)
    assert at.order is None
    assert at.enter(x) is x
    assert at.leave(x) is x


def test_an_unknown_attention_is_refused():
    with pytest.raises(UnknownNameError, match="unknown attention 'magic'; known: dense, tilewright, flex, native"):
        site("magic").layer()(*tensors())


def test_attention_inside_a_clock_is_timed(monkeypatch):
    ticks = iter(range(0, 1000, 3))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(ticks))
    attend, (q, k, v) = site("native").layer(), tensors()
    with clocks.clocked() as outer:
        attend(q, k, v)
        attention_sites.full(q, k, v)
        with clocks.clocked() as inner:
            attend(q, k, v)
        attention_sites.full(q, k, v)
    attend(q, k, v)
    assert (outer.seconds, inner.seconds) == (9, 3)


def test_attention_on_a_gpu_is_timed_between_events(monkeypatch):
    """What tells a GPU's time is told by its events, not by when the host got there."""
    clock = clocks.Clock()
    for us in (1000, 500):
        clock.spans.append((SimpleNamespace(elapsed_time=lambda end: end), us / 1e3))
    assert clock.seconds == 1.5e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("attention", ["dense", "native", "tilewright", "flex"])
def test_every_attention_gives_the_oracles_result_on_a_gpu(attention):
    at, there = site(attention), torch.device("cuda")
    bias = drawn_bias()
    q, k, v = (at.enter(x.transpose(1, 2).flatten(2)) for x in tensors())
    q, k, v = (x.unflatten(2, (HEADS, DIM)).transpose(1, 2).to(there) for x in (q, k, v))
    with clocks.clocked() as clock:
        out = at.layer()(q, k, v, bias.to(there)).transpose(1, 2).flatten(2)
        torch.cuda.synchronize()
    out = at.leave(out).unflatten(2, (HEADS, DIM)).transpose(1, 2).cpu()
    assert reference.relative_error(out, oracle(*tensors(), bias)) <= reference.TOLERANCE[torch.float32]
    assert clock.spans and clock.elapsed == 0 and clock.seconds > 0


def test_full_attention_is_that_of_everything():
    q, k, v = tensors()
    bias = torch.randn(HEADS, TOKENS, TOKENS)
    expected = reference.attention(q, k, v, torch.ones(TOKENS, TOKENS, dtype=torch.bool), bias=bias)
    torch.testing.assert_close(attention_sites.full(q, k, v, bias).double(), expected, atol=2e-5, rtol=0)


# ------------------------------------------------------------------------------------------- plans on disk


def test_a_plan_is_made_once_and_read_from_disk_after(cache, monkeypatch):
    first = site("tilewright")
    expected = attended(first.layer(), first, *tensors())
    (kept,) = cache.glob("*.plan")

    def refuse(*args, **options):
        raise AssertionError("a plan was made anew")

    monkeypatch.setattr(api, "plan", refuse)
    again = site("tilewright")
    assert torch.equal(attended(again.layer(), again, *tensors()), expected)
    assert torch.equal(again.order, first.order)
    assert list(cache.glob("*.plan")) == [kept]


def test_a_damaged_plan_is_made_anew(cache, caplog):
    first = site("tilewright")
    first.layer()(*tensors())
    (kept,) = cache.glob("*.plan")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        at = site("tilewright")
        torch.testing.assert_close(attended(at.layer(), at, *tensors()).double(), oracle(*tensors()), atol=2e-5, rtol=0)
    assert "a cached plan cannot be read and is made again" in caplog.text
    assert api.load(kept).graph.n_rows == TOKENS


def test_patterns_and_dtypes_have_plans_of_their_own(cache):
    at = site("tilewright")
    other = Windows(grid=(6, 6), n_global=1, radius=2, mode="exact")
    for asked, dtype in (
        (at, torch.float32),
        (at, torch.float16),
        (attention_sites.Site("tilewright", other.graph, HEADS, DIM, other.attend), torch.float32),
    ):
        tilewright.prepare(asked, None, dtype, torch.device("cpu"))
    assert len(list(cache.glob("*.plan"))) == 3


def test_each_gpu_has_a_plan_of_its_own(cache, monkeypatch):
    current, made = [None], []

    @contextmanager
    def device(index):
        current[0] = index
        yield

    def plan(pattern, *, device, **options):
        made.append((current[0], device))
        return SimpleNamespace(save=lambda path: None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(tilewright.devices, "describe", lambda kind: {"kind": kind, "name": "GPU"})
    monkeypatch.setattr(api, "plan", plan)
    first = site("tilewright")
    second = copy.deepcopy(first)
    for _ in range(2):
        for at, index in ((first, 0), (second, 1)):
            tilewright.prepare(at, None, torch.float16, torch.device("cuda", index))
    assert made == [(0, "cuda"), (1, "cuda")]
    assert len({id(first.plans[torch.float16, torch.device("cuda", index)]) for index in (0, 1)}) == 2


def test_the_order_needs_no_plan_and_is_that_of_every_plan(cache):
    at = site("tilewright")
    assert at.order.dtype == torch.int64
    assert not list(cache.glob("*.plan"))
    for dtype in (torch.float32, torch.bfloat16):
        tilewright.prepare(at, None, dtype, torch.device("cpu"))
        assert torch.equal(at.plans[dtype, torch.device("cpu")].row_order, at.order)


# ------------------------------------------------------------------------------------------- plans as asked for


@pytest.mark.parametrize("reorder", ["none", "rcm", "hc", "ic", "window"])
@pytest.mark.parametrize("bias", [None, drawn_bias()], ids=["plain", "bias"])
def test_a_site_attends_in_every_order(reorder, bias):
    at = site("tilewright")
    at.planned = Plans(reorder=reorder, solver="highs-paper", tiles=("4x1", "8x8"))
    found = attended(at.layer(), at, *tensors(), bias)
    torch.testing.assert_close(found.double(), oracle(*tensors(), bias), atol=2e-5, rtol=0)
    (plan,) = at.plans.values()
    assert plan.reorder["order"] == reorder and set(plan.blocks) == {"4x1", "8x8"}
    assert (plan.schedule.solver, plan.schedule.objective) == ("highs-paper", "paper")


def test_other_plans_are_other_files(cache):
    asked = [{}, {"reorder": "none"}, {"solver": "greedy"}, {"tiles": ("4x1",)}]
    for fields in asked:
        at = site("tilewright")
        at.planned = Plans(**fields)
        tilewright.prepare(at, None, torch.float32, torch.device("cpu"))
    assert len(list(cache.glob("*.plan"))) == len(asked)


@pytest.mark.parametrize("plans", [Plans(reorder="none", solver="greedy"), {"reorder": "none", "solver": "greedy"}])
@torch.inference_mode()
def test_a_network_plans_as_it_is_told(plans):
    family, options = networks.parse("vil-tiny-64")
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    told, own = (networks.create(family, **options, attention="tilewright", plans=each) for each in (plans, None))
    torch.testing.assert_close(told(images), own(images), atol=1e-4, rtol=1e-4)
    sites = {m.site for m in told.modules() if isinstance(m, attention_sites.Attend)}
    assert sites and all(at.planned == Plans("none", "greedy") for at in sites)
    made = [plan for at in sites for plan in at.plans.values()]
    assert made and all((p.reorder["order"], p.schedule.solver) == ("none", "greedy") for p in made)


@pytest.mark.parametrize(
    ("name", "attention", "plans", "error", "message"),
    [
        ("vil-tiny-64", "native", Plans(), ConfigError, "expected attention 'tilewright' over .*, found .*'native'"),
        ("dynamicvit-s-64", "tilewright", Plans(), ConfigError, "found patterns that depend on the image"),
        ("vil-tiny-64", "tilewright", {"order": "ic"}, ConfigError, "unknown field `order`; settings: reorder, solver"),
        ("vil-tiny-64", "tilewright", Plans(reorder="best"), UnknownNameError, "unknown order 'best'; known: none"),
        ("vil-tiny-64", "tilewright", Plans(solver="cplex"), UnknownNameError, "unknown solver 'cplex'; known: greedy"),
        ("vil-tiny-64", "tilewright", Plans(tiles=("64",)), TileError, "tile '64': expected MxN"),
    ],
)
def test_plans_that_cannot_be_are_refused(name, attention, plans, error, message):
    family, options = networks.parse(name)
    with pytest.raises(error, match=message):
        networks.create(family, **options, attention=attention, plans=plans)


def test_what_is_looked_up_is_copied_to_a_device_once():
    at = site("tilewright")
    with torch.inference_mode():
        copied = attention_sites.resident(at, "order", torch.device("meta"))
    assert copied.is_meta and not copied.is_inference()
    assert attention_sites.resident(at, "order", torch.device("meta")) is copied
    assert attention_sites.resident(at, "order", torch.device("cpu")) is at.order


def test_copies_of_a_layer_share_the_site():
    at = site("tilewright")
    attend = at.layer()
    expected = attended(attend, at, *tensors())
    copied = copy.deepcopy(attend)
    del attend
    assert torch.equal(attended(copied, at, *tensors()), expected)


def test_two_orders_are_refused(monkeypatch):
    orders = SimpleNamespace(row_order=np.arange(3), col_order=np.array([1, 0, 2]))
    monkeypatch.setattr(tilewright.reorder, "apply", lambda *a: (orders, {}))
    with pytest.raises(PatternError, match="expected one order for queries and keys of a self-attention, found two"):
        assert site("tilewright").order


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_network_may_be_compiled_before_its_first_call():
    family, options = networks.parse("vil-tiny-64")
    network = networks.create(family, **options, attention="tilewright")
    # Two layers of each kind are enough: compiling takes as long as there are layers.
    del network.layer3[5:]
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = torch.compile(network, backend="eager")(images)
        torch.testing.assert_close(found, network(images))
