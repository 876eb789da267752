"""Wan compiled: what layers and steps share, and where the compiler is interrupted."""

import copy

import pytest
import torch

from tilewright import networks
from tilewright.masks import wan as pattern


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 160, 1, 2))
    return networks.create_video("wan-tiny-480p-9f", height=48, width=80)


def inputs(network):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, *network.options.latents, generator=generator), torch.tensor([900.0, 12.5])


@torch.no_grad()
def test_layers_are_compiled_once_whatever_the_step(network):
    arguments = inputs(network)
    steps = {"keep": 1.0, "budget": 1.0, "steps": {"refresh": [0, 2], "first_dense": 1}}
    expected = network(*arguments)
    for name, settings, whole in (("slices", {"keep": 1.0, "budget": 1.0}, True), ("slices", steps, False)):
        torch.compiler.reset()
        other = copy.deepcopy(network).with_attention(name, settings)
        # A graph for each part of a layer.
        graphs = []

        def backend(module, examples, graphs=graphs):
            graphs.append(module)
            return module

        compiled = other.compile_layers(backend=backend, fullgraph=whole, dynamic=False)
        for step in range(4):
            assert torch.allclose(compiled(*arguments, step=step, branch=step % 2 * whole), expected, atol=1e-4)
            # All layers share them: before and after a stateful attention, else one.
            assert len(graphs) == 2 - whole


@torch.no_grad()
def test_a_whole_network_is_compiled_without_a_break(network):
    arguments = inputs(network)
    other = network.with_attention("slices", {"keep": 1.0, "budget": 1.0}, "hilbert")
    other.prepare(arguments[0])
    compiled = torch.compile(other, backend="eager", fullgraph=True, dynamic=False)
    assert torch.allclose(compiled(*arguments), network(*arguments), atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*arguments, step=1, branch=1)
