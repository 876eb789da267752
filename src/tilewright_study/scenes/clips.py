"""Clips of moving photographs, and their latents: training and test data of video networks, made by rule.

A clip pans, zooms and turns over a photograph while cut-outs of photographs move across it and cover each other. It is
a function of its index: everything in it is drawn from ``(seed, split, index)``. Splits share no photograph. Latents
are 16 coefficients of a discrete cosine transform of 4 x 8 x 8 pixels, the strides of the autoencoder of Wan 2.1, hence
of its token geometry. No weights are needed.
"""

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.core import artifacts, images, registry
from tilewright.core.errors import PatternError

# Photographs of `core.images` by split.
SPLITS = {"train": ("astronaut", "coffee", "hubble_deep_field", "retina"), "test": ("chelsea", "rocket")}
# Sides of a photograph in pixels.
PHOTOGRAPH = 960
# Pixels of a latent: frames, rows, columns.
STRIDE = (4, 8, 8)
# ASSUME: ranges from which a clip is drawn. Zoom is the share of a photograph's side that the longer side of
# a frame shows, pan the way through what is left; patches are in sides of a photograph, radii and ways of cut-outs in
# heights of a frame, angles in radians. A cut-out moves by some 0.3 heights: in 81 frames of 480 pixels by a token or
# more in each latent frame.
CUT_OUTS = (2, 5)
ZOOM, PAN, TURN = (0.5, 0.9), (-1.0, 1.0), (-0.2, 0.2)
RADIUS, GROWTH, PATCH = (0.12, 0.34), (-0.25, 0.25), (0.12, 0.3)
TRAVEL, FALL, SPIN = (-0.5, 0.5), (-0.25, 0.25), (-0.8, 0.8)
WAVES, DEPTH = (2, 5), (0.05, 0.2)
# Width of a cut-out's soft edge and of its dark rim, in radii, and how dark the rim is.
EDGE, RIM, DARK = 0.04, 0.12, 0.35
# Full-range luma and colour differences (ITU-R BT.601).
_COLOURS = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


class Channel(NamedTuple):
    """A coefficient of the transform: its colour (luma, blue and red difference), its frequencies along frames, rows
    and columns, and its mean and standard deviation over the clips."""

    colour: int
    t: int
    y: int
    x: int
    mean: float
    deviation: float


# The sixteen with the largest variance over 24 clips of the training split, of 36 frames of 240 x 416 pixels: 96 % of
# the variance of all 768.
CHANNELS = (
    Channel(0, 0, 0, 0, 5.36, 3.9),
    Channel(2, 0, 0, 0, 1.95, 1.8),
    Channel(1, 0, 0, 0, -1.19, 1.12),
    Channel(0, 1, 0, 0, 0.0, 0.7),
    Channel(0, 0, 1, 0, 0.0, 0.57),
    Channel(0, 0, 0, 1, 0.0, 0.52),
    Channel(0, 1, 1, 0, 0.0, 0.33),
    Channel(0, 1, 0, 1, 0.0, 0.3),
    Channel(0, 2, 0, 0, 0.0, 0.28),
    Channel(2, 1, 0, 0, 0.0, 0.23),
    Channel(0, 0, 1, 1, 0.0, 0.23),
    Channel(0, 0, 2, 0, 0.0, 0.21),
    Channel(0, 2, 1, 0, 0.0, 0.2),
    Channel(0, 2, 0, 1, 0.0, 0.2),
    Channel(0, 0, 0, 2, 0.0, 0.2),
    Channel(0, 1, 1, 1, 0.0, 0.18),
)


def video(
    index: int,
    frames: int,
    height: int,
    width: int,
    *,
    seed: int = 0,
    split: str = "train",
    device: str | torch.device = "cpu",
) -> Tensor:
    """The clip `index` in pixels: float32 [3, frames, height, width], RGB in 0..1. All sizes are in pixels.

    Raises `UnknownNameError` for a split, `PatternError` for a size or an index that is negative or none.
    """
    registry.check("split", split, SPLITS)
    _positive(frames=frames, height=height, width=width)
    if index < 0 or seed < 0:
        raise PatternError(f"clip: expected an index and a seed of at least 0, found {index} and {seed}")
    drawn = np.random.default_rng([seed, list(SPLITS).index(split), index])
    others = list(_photographs(split, str(device)))
    ground = others.pop(drawn.integers(len(others)))
    times = torch.linspace(0, 1, frames, device=device)[:, None, None]
    # In heights of a frame, from its middle.
    rows = ((torch.arange(height, device=device) + 0.5) / height - 0.5)[:, None]
    columns = (torch.arange(width, device=device) + 0.5 - width / 2) / height
    picture = _ground(drawn, ground, times, rows, columns, width / height)
    for _ in range(drawn.integers(*CUT_OUTS, endpoint=True)):
        # Not of the ground's photograph: a cut-out of the same sky could not be seen.
        photograph = others[drawn.integers(len(others))]
        picture = _covered(picture, drawn, photograph, times, rows, columns, width / height)
    return picture.clamp(0, 1)


def latents(
    indices: Iterable[int],
    frames: int,
    height: int,
    width: int,
    seed: int = 0,
    *,
    split: str = "train",
    device: str | torch.device = "cpu",
) -> Tensor:
    """Latents of the clips `indices`: float32 [n, 16, frames, height, width]; all sizes are in latents, of `STRIDE`
    pixels each. Each channel has about zero mean and unit variance. Raises as `video`."""
    _positive(frames=frames, height=height, width=width)
    pixels = [size * stride for size, stride in zip((frames, height, width), STRIDE, strict=True)]
    made = [encode(video(index, *pixels, seed=seed, split=split, device=device)) for index in indices]
    return torch.stack(made) if made else torch.empty(0, len(CHANNELS), frames, height, width, device=device)


def encode(pixels: Tensor) -> Tensor:
    """Latents [..., 16, T, H, W] of pixels [..., 3, 4T, 8H, 8W] in 0..1.

    Raises `PatternError` for sizes that the strides do not divide.
    """
    sizes = pixels.shape[-3:]
    if pixels.shape[-4] != 3 or any(size % stride for size, stride in zip(sizes, STRIDE, strict=True)):
        raise PatternError(f"pixels: expected [..., 3, 4T, 8H, 8W], found {list(pixels.shape)}")
    patches = pixels.unflatten(-1, (-1, STRIDE[2])).unflatten(-3, (-1, STRIDE[1])).unflatten(-5, (-1, STRIDE[0]))
    forward, _ = _bases(str(pixels.device))
    mean, deviation = _scales(pixels.device)
    return (torch.einsum("...dtahbwc,ndabc->...nthw", patches, forward) - mean) / deviation


def decode(latent: Tensor) -> Tensor:
    """Pixels [..., 3, 4T, 8H, 8W] that latents [..., 16, T, H, W] stand for; detail that they do not hold is missing.

    Not clamped to 0..1: ``encode(decode(x))`` is x.
    """
    _, backward = _bases(str(latent.device))
    mean, deviation = _scales(latent.device)
    patches = torch.einsum("...nthw,ndabc->...dtahbwc", latent * deviation + mean, backward)
    return patches.flatten(-2, -1).flatten(-3, -2).flatten(-4, -3)


def frames(latent: Tensor, count: int) -> np.ndarray:
    """uint8 [count, 8H, 8W, 3]: frames of the clip that latents [16, T, H, W] stand for, evenly spread, or all."""
    pixels = decode(latent.float().cpu())
    chosen = torch.linspace(0, pixels.shape[1] - 1, min(count, pixels.shape[1])).round().long()
    return (255 * pixels[:, chosen].clamp(0, 1)).round().byte().permute(1, 2, 3, 0).numpy()


def write_sheet(path, clips: Iterable[Tensor], count: int, height: int) -> None:
    """Write a picture with a row for each of `clips`, latents [16, T, H, W]: `count` frames, `height` pixels high."""
    from PIL import Image

    rows = []
    for latent in clips:
        shown = [Image.fromarray(frame) for frame in frames(latent, count)]
        width = round(height * shown[0].width / shown[0].height)
        rows.append(np.concatenate([np.asarray(frame.resize((width, height))) for frame in shown], 1))
    widest = max(row.shape[1] for row in rows)
    sheet = np.concatenate([np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0))) for row in rows])
    with artifacts.atomic(path) as temporary:
        Image.fromarray(sheet).save(temporary, format="PNG")


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise PatternError(f"clip: expected {name} of at least 1, found {size}")


@cache
def _photographs(split: str, device: str) -> Tensor:
    """float32 [photographs, 3, PHOTOGRAPH, PHOTOGRAPH]."""
    loaded = np.stack([images.load(name, PHOTOGRAPH) for name in SPLITS[split]])
    return torch.from_numpy(loaded).to(device)


def _between(drawn: np.random.Generator, span: tuple[float, float]) -> float:
    return float(drawn.uniform(*span))


def _path(drawn: np.random.Generator, span: tuple[float, float], times: Tensor) -> Tensor:
    """A value that goes from one drawn from `span` to another in the course of a clip."""
    start, end = drawn.uniform(*span, 2)
    return start + (end - start) * times


def _sampled(photograph: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[3, T, H, W]: a photograph at places x, y [T, H, W], in heights from its middle; mirrored beyond its edges."""
    places = 2 * torch.stack([x, y], -1)
    taken = photograph.expand(len(x), -1, -1, -1)
    found = torch.nn.functional.grid_sample(taken, places, padding_mode="reflection", align_corners=False)
    return found.transpose(0, 1)


def _turned(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()


def _ground(drawn, photograph, times, rows, columns, aspect):
    """The photograph that a clip pans over: [3, T, H, W]."""
    zoom, angle = _path(drawn, ZOOM, times), _path(drawn, TURN, times)
    right, down = ((1 - zoom) / 2 * _path(drawn, PAN, times) for _ in range(2))
    x, y = _turned(columns, rows, angle)
    height = zoom / max(aspect, 1)
    return _sampled(photograph, right + height * x, down + height * y)


def _covered(picture, drawn, photograph, times, rows, columns, aspect):
    """`picture` with a cut-out in front: a patch of a photograph with a wavy outline, on its own way."""
    radius = _between(drawn, RADIUS) * (1 + _path(drawn, GROWTH, times))
    angle = _path(drawn, SPIN, times)
    right = _between(drawn, (-aspect / 2, aspect / 2)) + _path(drawn, TRAVEL, times)
    down = _between(drawn, (-0.5, 0.5)) + _path(drawn, FALL, times)
    patch = _between(drawn, PATCH)
    middle = [_between(drawn, (patch - 0.5, 0.5 - patch)) for _ in range(2)]
    waves, depth, phase = (
        int(drawn.integers(*WAVES, endpoint=True)),
        _between(drawn, DEPTH),
        _between(drawn, (0, math.tau)),
    )

    x, y = _turned((columns - right) / radius, (rows - down) / radius, angle)
    distance = torch.hypot(x, y) / (1 + depth * torch.cos(waves * torch.atan2(y, x) + phase))
    cover = ((1 - distance) / EDGE).clamp(0, 1)
    rim = 1 - DARK * (1 - ((1 - distance) / RIM).clamp(0, 1))
    colour = _sampled(photograph, middle[0] + patch * x, middle[1] + patch * y) * rim
    return picture + cover * (colour - picture)


def _cosines(size: int) -> Tensor:
    """float64 [size, size]: the orthonormal discrete cosine transform, its frequencies in the rows."""
    at = (torch.arange(size, dtype=torch.float64) + 0.5) * math.pi / size
    rows = torch.cos(torch.arange(size, dtype=torch.float64)[:, None] * at) * (2 / size) ** 0.5
    rows[0] /= 2**0.5
    return rows


@cache
def _bases(device: str) -> tuple[Tensor, Tensor]:
    """What encodes and what decodes: float32 [16, 3, 4, 8, 8] each."""
    colours = torch.tensor(_COLOURS, dtype=torch.float64)
    t, y, x = map(_cosines, STRIDE)

    def products(colours):
        made = [
            torch.einsum("d,a,b,c->dabc", colours[channel.colour], t[channel.t], y[channel.y], x[channel.x])
            for channel in CHANNELS
        ]
        return torch.stack(made).float().to(device)

    return products(colours), products(torch.linalg.inv(colours).mT)


def _scales(device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel: [16, 1, 1, 1]."""
    stated = torch.tensor([(channel.mean, channel.deviation) for channel in CHANNELS], device=device)
    mean, deviation = stated.T[:, :, None, None, None]
    return mean, deviation
