"""Rectified flow against flows whose solution is known in closed form."""

from itertools import pairwise

import pytest
import torch

from tilewright import networks
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.networks import rectified_flow

MEAN, DEVIATION = 1.5, 0.5


def gaussian(x, sigma, step):
    """The velocity E[noise - clean | x] of clean values from a normal distribution, and of normal noise."""
    mean, variance = (1 - sigma) * MEAN, ((1 - sigma) * DEVIATION) ** 2 + sigma**2
    return -MEAN + (sigma - (1 - sigma) * DEVIATION**2) / variance * (x - mean)


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_a_gaussian_flow_is_followed_in_the_first_order(shift):
    start = noise(1000)
    errors = [
        float(
            (rectified_flow.euler(gaussian, start, rectified_flow.sigmas(steps, shift)) - (MEAN + DEVIATION * start))
            .abs()
            .mean()
        )
        for steps in (25, 50, 100, 200)
    ]
    assert errors[-1] < 0.02
    assert all(1.7 < first / second < 2.3 for first, second in pairwise(errors))


def test_a_flow_to_one_point_ends_there():
    def velocity(x, sigma, step):
        return (x - MEAN) / sigma

    assert torch.allclose(
        rectified_flow.euler(velocity, noise(5), rectified_flow.sigmas(7, 3.0)), torch.full((5,), MEAN).double()
    )


def test_times_are_shifted_as_published():
    times = rectified_flow.sigmas(4, 3.0).tolist()
    assert times == pytest.approx([1, 3 * 0.75 / 2.5, 1.5 / 2, 0.75 / 1.5, 0])
    assert rectified_flow.sigmas(4, 1.0).tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_points_and_velocities_of_lines():
    clean, other = noise(2, 3, 4), noise(2, 3, 4).flip(0)
    point, velocity = rectified_flow.noised(clean, other, torch.tensor([0.0, 0.25]).double())
    assert torch.equal(point[0], clean[0])
    assert torch.allclose(point[1], 0.75 * clean[1] + 0.25 * other[1])
    assert torch.equal(velocity, other - clean)


@pytest.mark.parametrize(("steps", "shift", "message"), [(0, 3.0, "steps: expected"), (4, 0.0, "shift: expected")])
def test_wrong_steps_are_refused(steps, shift, message):
    with pytest.raises(ConfigError, match=message):
        rectified_flow.sigmas(steps, shift)


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 160, 1, 1))
    return networks.create_video("wan-tiny-480p-5f", height=32, width=48)


def test_a_seed_decides_a_clip(network):
    first, again, other = (network.sample(steps=2, seed=seed) for seed in (0, 0, 1))
    assert first.latents.shape == (1, 16, 2, 4, 6) and first.passes == 2
    assert torch.equal(first.latents, again.latents)
    assert not torch.equal(first.latents, other.latents)
    given = network.sample(steps=2, noise=torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(first.latents, given.latents)


def test_guidance_takes_two_passes_a_step(network):
    text = torch.randn(1, 3, pattern.TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    calls, sizes = [], {"steps": 2, "seed": 0}
    handle = network.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((kwargs["step"], kwargs["branch"], args[2] is text)), with_kwargs=True
    )
    found = network.sample(text, guidance=4.0, **sizes)
    assert found.passes == 4
    assert calls == [(0, 0, True), (0, 1, False), (1, 0, True), (1, 1, False)]
    handle.remove()
    # The same, written out.
    x = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for sigma, following in ((1.0, 0.75), (0.75, 0.0)):
            with_text, without = (network(x, 1000 * sigma, prompt) for prompt in (text, None))
            x = x + (following - sigma) * (without + 4 * (with_text - without))
    assert torch.allclose(found.latents, x, atol=1e-5)


def test_a_guidance_of_one_is_none(network):
    text = torch.randn(1, 3, pattern.TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    one, none = (network.sample(text, steps=2, guidance=guidance) for guidance in (1, None))
    assert one.passes == none.passes == 2 and torch.equal(one.latents, none.latents)


def test_a_resolution_has_its_shift(network):
    assert network.options.shift == 3.0
    assert networks.create_video("wan-tiny-720p-5f", height=32, width=48).options.shift == 5.0
    assert not torch.equal(network.sample(steps=2).latents, network.sample(steps=2, shift=5.0).latents)
