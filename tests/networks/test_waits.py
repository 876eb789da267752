"""Networks with learned biases: no call waits for the device, compilers see them whole, changed biases count."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import networks
from tilewright.attention import backends
from tilewright.core.errors import ArtifactError, PatternError
from tilewright.networks import attention_sites, regionvit
from tilewright.networks._sliding_chunks import Windows

SIZE = 32
FAMILIES = ("regionvit", "vision_longformer")
# Operators by which the host asks for values.
READS = ("aten::equal", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")


class Reads(TorchDispatchMode):
    """Counts the calls by which the host would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += [func.name()] if func.name() in READS else []
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True, scope="module")
def plans(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield


def create(family, attention="tilewright", seed=0):
    options = {"position": "relative"} if family == "vision_longformer" else {}
    return networks.create(family, variant="tiny", image_size=SIZE, attention=attention, seed=seed, **options)


def images():
    return torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def biases(network):
    named = network.named_parameters()
    return [p for name, p in named if "rel_pos" in name or "local_relative_position_bias_table" in name]


def _assigned(network):
    network.load_state_dict({name: x.clone() for name, x in network.state_dict().items()}, assign=True)
    return network


@pytest.mark.parametrize("attention", ["native", "dense", "tilewright"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_asks_the_device_for_no_value(monkeypatch, family, attention):
    # As on a GPU: elsewhere tables are compared by their values.
    monkeypatch.setattr(attention_sites, "compared", lambda device: False)
    network = create(family, attention)
    with torch.inference_mode():
        network(images())
        with Reads() as reads:
            network(images())
    assert reads.found == []


@pytest.mark.parametrize(
    "handled",
    [
        pytest.param(lambda network: create("regionvit"), id="made"),
        pytest.param(lambda network: network.double().float(), id="moved"),
        pytest.param(copy.deepcopy, id="copied"),
        pytest.param(_assigned, id="loaded"),
    ],
)
def test_a_network_handled_in_inference_mode_asks_for_no_value(monkeypatch, handled):
    """Its parameters count versions all the same."""
    monkeypatch.setattr(attention_sites, "compared", lambda device: False)
    with torch.inference_mode():
        network = handled(create("regionvit"))
        before = network(images())
        with Reads() as reads:
            network(images())
        assert reads.found == []
        biases(network)[0].normal_()
        assert not torch.equal(network(images()), before)
    assert not any(parameter.is_inference() for parameter in network.parameters())


@torch.no_grad()
def test_a_compiled_network_is_whole_and_follows_its_biases(monkeypatch):
    # Compiling takes as long as there are layers.
    monkeypatch.setitem(regionvit.SIZES, "tiny", ((1, 1, 2, 1), 3))
    network, other = create("regionvit"), create("regionvit", seed=1)
    torch.compiler.reset()
    network(images())
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)
    first = compiled(images())
    close(first, network(images()))
    with torch.compiler.set_stance("fail_on_recompile"):
        for table in biases(network):
            table.normal_()
        written = compiled(images())
        close(written, network(images()))
        assert not torch.allclose(written, first, atol=1e-3)
        network.load_state_dict(other.state_dict())
        close(compiled(images()), other(images()))


class Layer(torch.nn.Module):
    """One layer at a site of a Vision Longformer, with a learned bias."""

    def __init__(self, attention):
        super().__init__()
        windows = Windows(grid=(7, 7), n_global=1, radius=2, mode="chunk")
        self.attend = attention_sites.Site(attention, windows.graph, 2, 16, windows.attend, windows.bias_index).layer()
        self.table = torch.nn.Parameter(torch.randn(2, 7 * 7 + 3))

    def forward(self, q, k, v):
        return self.attend(q, k, v, lambda: F.pad(self.table, (0, 1)), (self.table,))


def tokens():
    return torch.randn(3, 2, 2, 50, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attention", ["native", "tilewright"])
@torch.no_grad()
def test_compiled_layers_follow_their_own_biases(attention):
    layer = Layer(attention)
    twin = copy.deepcopy(layer)
    twin.table.normal_()
    torch.compiler.reset()
    for each in (layer, twin):
        compiled = torch.compile(each, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(*tokens()), each(*tokens()), atol=1e-6, rtol=0)
            each.table.normal_()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("attention", ["native", "tilewright"])
def test_compiled_layers_have_gradients_of_their_biases(attention, frozen):
    layer, (q, k, v) = Layer(attention), tokens()
    given = q.requires_grad_(), layer.table
    # A layer that was called before with gradients of its table.
    layer(q, k, v)
    if frozen:
        layer.table.requires_grad_(False)
        given = given[:1]
    wanted = torch.autograd.grad(layer(q, k, v).square().sum(), given)
    torch.compiler.reset()
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v)
    for x, y in zip(torch.autograd.grad(out.square().sum(), given), wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_a_compiled_layer_with_a_plan_refuses_a_backward_where_there_is_none(monkeypatch):
    monkeypatch.setattr(backends, "differentiates", lambda kind: False)
    layer, (q, k, v) = Layer("tilewright"), tokens()
    layer(q, k, v)
    torch.compiler.reset()
    out = torch.compile(layer, fullgraph=True, backend="eager")(q.requires_grad_(), k, v)
    torch.testing.assert_close(out, layer(q, k, v), atol=1e-6, rtol=0)
    with pytest.raises(PatternError, match="no backward: train with attention='dense'"):
        out.sum().backward()


def test_compiled_code_is_interrupted_by_dense_attention_for_its_gradients():
    layer, (q, k, v) = Layer("dense"), tokens()
    torch.compiler.reset()
    torch.compile(layer, backend="eager")(q.requires_grad_(), k, v).sum().backward()
    expected, q.grad = q.grad, None
    layer(q, k, v).sum().backward()
    torch.testing.assert_close(q.grad, expected)


def test_the_attention_of_a_network_that_is_gone_is_refused_by_name():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ArtifactError, match="calls the attention 0123, which is not in this process"):
        torch.ops.tilewright.attend_at(q, q, q, torch.zeros(1, 2), [], "0123")


def test_compilers_know_the_form_of_a_result():
    out = torch.randn(2, 5, 3, 4)
    for x in (out, out.transpose(1, 2)):
        like = attention_sites._like_result(x, x, x, None, [], "")
        assert (like.shape, like.stride()) == (x.shape, attention_sites._by_token(x).stride())
