"""Rectified flow (Liu et al., arXiv 2209.03003; Lipman et al., arXiv 2210.02747): straight lines from data to noise.

A point of the line is ``(1 - sigma) clean + sigma noise``, and its velocity ``noise - clean`` is what a network learns.
"""

from collections.abc import Callable

import torch

from tilewright.core.errors import ConfigError

# Times of the networks at pure noise.
SCALE = 1000.0


def sigmas(steps: int, shift: float) -> torch.Tensor:
    """Shares of noise from 1 to 0 in `steps` steps, float64 [steps + 1]; `shift` above 1 keeps longer to much noise.

    The shift is that of Esser et al., arXiv 2403.03206, section 5.3.2. Raises `ConfigError`.
    """
    if steps < 1:
        raise ConfigError(f"steps: expected at least 1, found {steps}")
    if not shift > 0:
        raise ConfigError(f"shift: expected a number above 0, found {shift}")
    return shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64, device="cpu"), shift)


def shifted(sigma: torch.Tensor, shift: float) -> torch.Tensor:
    """Shares of noise, moved towards 1 by a `shift` above 1."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def noised(clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The point of the line and its velocity; sigma: [B], for tensors [B, ...]."""
    sigma = sigma.view(-1, *(1,) * (clean.ndim - 1))
    return torch.lerp(clean, noise, sigma), noise - clean


def euler(velocity: Callable, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Follow ``velocity(x, sigma, step)`` from noise at ``sigmas[0]`` to ``sigmas[-1]``, in the type of `noise`."""
    x = noise
    for step, (sigma, following) in enumerate(zip(sigmas.tolist()[:-1], sigmas.tolist()[1:], strict=True)):
        x = x + (following - sigma) * velocity(x, sigma, step).to(x.dtype)
    return x


def guided(
    network: torch.nn.Module, text: torch.Tensor | None, negative: torch.Tensor | None, guidance: float | None
) -> tuple[Callable, int]:
    """``velocity(x, sigma, step)`` of a network with classifier-free guidance, and the passes of a step.

    text, negative: prompts as the network takes them. guidance: how many times the step from `negative` to `text` is
    taken; None or 1: `text` alone, in one pass instead of two.
    """
    with_text = _branch(network, text, 0)
    if guidance is None or guidance == 1:
        return with_text, 1
    without = _branch(network, negative, 1)

    def velocity(x, sigma, step):
        towards = with_text(x, sigma, step)
        return torch.lerp(without(x, sigma, step), towards, guidance)

    return velocity, 2


def _branch(network, text, branch):
    def velocity(x, sigma, step):
        time = torch.full((len(x),), SCALE * sigma, dtype=torch.float32, device=x.device)
        return network(x, time, text, step=step, branch=branch).float()

    return velocity
