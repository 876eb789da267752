"""Wan on a GPU: without waiting, captured, in 16 bits, trained."""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright import networks
from tilewright.masks import wan as pattern
from tilewright_study.training import video

pytestmark = pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="captures CUDA graphs, and this machine has no GPU")

NAME = "wan-tiny-480p-9f"
SETTINGS = {"slices": {"keep": 0.5, "budget": 0.6}, "blocks": {"keep": 0.5, "budget": 0.6}, "dense": None}
STEPS = {"keep": 1.0, "budget": 1.0, "steps": {"refresh": [0], "first_dense": 0}}


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(256, 320, 2, 2))
    return networks.create_video(NAME, height=128, width=208).lowered(torch.bfloat16).to(TRITON_DEVICE)


def inputs(network, seed):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, *network.options.latents, generator=generator)
    text = torch.randn(1, 20, pattern.TEXT_WIDTH, generator=generator)
    return [x.to(TRITON_DEVICE) for x in (latents, torch.tensor([500.0 + seed]), text)]


@torch.no_grad()
@pytest.mark.parametrize("name", SETTINGS)
def test_a_pass_does_not_wait_and_can_be_captured(network, name):
    other = network.with_attention(name, SETTINGS[name], "hilbert")
    arguments = inputs(network, 0)
    # The first call makes tables and compiles kernels.
    other(*arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        other(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = other(*arguments)
    for seed in (1, 2):
        for x, changed in zip(arguments, inputs(network, seed), strict=True):
            x.copy_(changed)
        graph.replay()
        torch.cuda.synchronize()
        expected = other(*inputs(network, seed))
        assert expected.isfinite().all()
        assert torch.allclose(captured, expected, atol=1e-3)


@torch.no_grad()
def test_all_keys_are_dense_attention(network):
    arguments = inputs(network, 0)
    expected = network(*arguments)
    for name in ("slices", "blocks"):
        for settings in ({"keep": 1.0, "budget": 1.0}, STEPS):
            found = network.with_attention(name, settings)(*arguments)
            # ASSUME: two layers in bfloat16 differ by a few of its steps.
            assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_training_runs_in_16_bits(monkeypatch, tmp_path):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 256, 1, 2))
    network = networks.create_video(NAME).to(TRITON_DEVICE)
    recipe = video.Recipe(
        stages=(video.Stage(steps=30, batch=8, clips=8, frames=3, height=16, width=12),), rate=3e-3, warmup=5
    )

    def latents(indices, frames, height, width, seed):
        generator = torch.Generator().manual_seed(seed)
        return 3 * torch.randn(1, 16, 1, 1, 1, generator=generator).expand(len(indices), 16, frames, height, width)

    trained = video.train(network, latents, recipe, tmp_path / "tiny.safetensors")
    assert trained.losses[-1] < 0.5 * trained.losses[0]
