"""Captured attention maps: queries, keys and values of a video network's layers, on a clip at a level of noise.

For a network that was trained here the clip is one that it has not seen (`tilewright_study.scenes.clips`). For others
no clip can be made without their autoencoder: they remove noise themselves, down to the level that is asked for.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright import devices
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.networks import rectified_flow
from tilewright_study.scenes import clips

# Euler's steps from pure noise to the level of noise, where a network makes the clip itself.
STEPS = 10


@dataclass(frozen=True)
class Captured:
    """q, k, v: float32 [1, H, tokens, D], tokens in raster order. heads: layer and head of each."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: tuple[tuple[int, int], ...]


def spread(depth: int, count: int) -> tuple[int, ...]:
    """`count` layers of `depth`, evenly spread, the first and the last among them; all where there are fewer."""
    chosen = torch.linspace(0, depth - 1, min(count, depth), dtype=torch.float64)
    return tuple(chosen.round().long().tolist())


def photographs(grid: Sequence[int], *, seed: int = 0, device: str | torch.device = "cpu") -> Tensor:
    """Latents float32 [1, 16, T, H, W] of a clip of the split ``test``, for a `grid` of tokens."""
    sizes = [size * patch for size, patch in zip(grid, pattern.PATCH, strict=True)]
    frames, height, width = sizes
    return clips.latents([seed], frames, height, width, split="test", device=device)


class _Observed:
    """The attention of a layer whose inputs and results are shown to ``seen(layer, q, k, v, out)``."""

    def __init__(self, layer, seen):
        self.own, self.seen, self.attention = layer, seen, layer.attention

    def __call__(self, q, k, v):
        """Attend."""
        out = self.own(q, k, v)
        self.seen(self.own.layer, q, k, v, out)
        return out


@contextlib.contextmanager
def observed(network, latents: Tensor, seen: Callable) -> Iterator[None]:
    """Call ``seen(layer, q, k, v, out)`` after each attention [B, H, N, D] of clips like `latents`, in the order in
    which tokens stand. For layers that are not compiled."""
    layers = network.clip(pattern.grid(latents.shape), latents.device).layers
    own = list(layers)
    layers[:] = [_Observed(layer, seen) for layer in own]
    try:
        yield
    finally:
        layers[:] = own


@torch.no_grad()
def tokens(network, grid: Sequence[int], noise: float, layers: Sequence[int], *, clean=None, seed: int = 0) -> Captured:
    """Queries, keys and values of all heads of `layers`, of a clip with a `grid` of tokens at a level of `noise`.

    noise: share of noise in the clip, above 0 to 1. clean: latents [1, 16, T, H, W] of the clip; None: the network
    makes it, without a prompt. On a GPU products are in bfloat16, as in training. Raises `ConfigError` for a level of
    noise.
    """
    if not 0 < noise <= 1:
        raise ConfigError(f"noise: expected a share above 0, at most 1, found {noise}")
    dense = network.with_attention("dense", order="raster")
    device = next(network.parameters()).device
    sizes = [size * patch for size, patch in zip(grid, pattern.PATCH, strict=True)]
    drawn = torch.randn(1, pattern.CHANNELS, *sizes, generator=torch.Generator().manual_seed(seed)).to(device)
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def seen(layer, q, k, v, _):
        if layer in layers:
            found[layer] = q, k, v

    with torch.autocast(device.type, torch.bfloat16, enabled=devices.facts(device.type).CUDA):
        if clean is None:
            velocity, _ = rectified_flow.guided(dense, None, None, None)
            levels = torch.linspace(1, noise, STEPS + 1, dtype=torch.float64)
            point = rectified_flow.euler(velocity, drawn, levels)
        else:
            point, _ = rectified_flow.noised(clean.to(device), drawn, torch.full((1,), noise, device=device))
        with observed(dense, point, seen):
            dense(point, rectified_flow.SCALE * noise)
    q, k, v = (torch.cat([found[layer][at] for layer in layers], 1).float() for at in range(3))
    each = q.shape[1] // len(layers)
    return Captured(q, k, v, tuple((layer, head) for layer in layers for head in range(each)))
