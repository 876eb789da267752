"""Training of video networks by rectified flow: AdamW on clips of growing size, averaged weights, resumable.

What a step does follows from the recipe and its number alone, so that a training that was interrupted ends with the
weights of one that was not. Gradients go through dense attention.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch

from tilewright import devices
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.networks import rectified_flow
from tilewright_study.training import _loop, states
from tilewright_study.training.states import Number, Positive, Share

KIND = "video training"
# Written weights: half the bytes, and what a GPU computes with.
SAVED = torch.bfloat16
# Clips that are made at once.
CHUNK = 64
Positively = Annotated[float, msgspec.Meta(gt=0)]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps on clips of one size. batch: clips of a step, drawn from `clips` different ones; frames, height, width: of
    their latents. shift: of the times, towards noise; they are drawn from a logistic normal distribution."""

    steps: Positive
    batch: Positive
    clips: Positive
    frames: Positive
    height: Positive
    width: Positive
    shift: Positively = 1.0


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a network is trained.

    rate: of learning, from 0 in `warmup` steps, then to a tenth of it along a cosine. weight_decay: of matrices. norm:
    of the gradient, at most. average: of the weights of a step in what is kept, towards 1 from the first steps on.
    seed: of all that is drawn.
    """

    stages: tuple[Stage, ...]
    rate: Number = 5e-4
    warmup: Positive = 100
    weight_decay: Number = 0.01
    norm: Number = 1.0
    average: Share = 0.999
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self):
        if not self.stages:
            raise ConfigError("stages: expected at least one, found none")

    @property
    def steps(self):
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step):
        """``(number, stage)`` of a step, numbers from 1."""
        ends = itertools.accumulate(stage.steps for stage in self.stages)
        number = next(number for number, end in enumerate(ends, 1) if step < end)
        return number, self.stages[number - 1]

    def rate_at(self, step):
        """The learning rate of a step."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))


# `wan-tiny`, on clips of 128 x 224, 240 x 416 and 480 x 832 pixels: 560, 3,510 and 32,760 tokens, where a step takes 7,
# 21 and 74 TFLOP. Most steps are taken where they are cheap.
# ASSUME: five minutes of one H200 at 150, 300 and 400 TFLOP/s, and one more for clips and the compiler. The rate of
# learning is that of narrow networks, which take a larger one.
TINY = Recipe(
    stages=(
        Stage(steps=1600, batch=64, clips=4096, frames=5, height=16, width=28),
        Stage(steps=800, batch=16, clips=2048, frames=9, height=30, width=52, shift=1.5),
        Stage(steps=400, batch=1, clips=128, frames=21, height=60, width=104, shift=3.0),
    ),
    rate=1e-3,
    warmup=200,
    average=0.995,
)


@dataclass
class Trained:
    """What a training left. path: of the averaged weights, in `SAVED`. done: whether it came to the recipe's end.

    losses: the loss of each step. constant: that of the best constant answer to the same batches, as a network that
    has learned nothing would have it.
    """

    path: Path
    done: bool
    losses: list[float] = field(default_factory=list)
    constant: list[float] = field(default_factory=list)


@_loop.finite()
def train(
    network, latents: Callable, recipe: Recipe, path, *, limit_s=None, every_s=120.0, compiled=False, show=None
) -> Trained:
    """Train `network`, on its device, and write its averaged weights to `path`, a ``.safetensors`` file, or an
    ``.index.json`` beside several of at most `states.PART_BYTES`.

    latents: ``latents(indices, frames, height, width, seed) -> float32 [n, 16, frames, height, width]``, the clips of
    these numbers. limit_s: stop after so many seconds, and write the averages so far; the next call with the same
    arguments goes on. every_s: how often the state is written, which is beside `path` until the end,
    ``<stem>.state.safetensors``. compiled: its layers, by ``torch.compile``. show: takes lines about the progress. On a
    GPU products are in bfloat16. The network is left with the averaged weights.

    Raises `ConfigError` for a network that cannot be trained, `ArtifactError` for a state of another recipe,
    network or clips, `TrainingError` where many gradients are not finite.
    """
    if network.attention != "dense":
        raise ConfigError(f"attention: expected dense, through which gradients go, found {network.attention!r}")
    path, recipe = Path(path), states.sound(recipe)
    stage = recipe.stages[0]
    first = latents([0], stage.frames, stage.height, stage.width, recipe.seed)
    data = {"means": states.means(first.cpu())}
    state = states.State(KIND, network, recipe, path, betas=(0.9, 0.99), width=2, data=data)
    state.resume()
    if compiled:
        network.compile_layers(dynamic=False)
    with state.kept():
        done = _run(state, latents, limit_s, every_s, show)
    state.settle()
    state.keep(path, lambda _: SAVED)
    if done:
        state.path.unlink(missing_ok=True)
    return Trained(path, done, *state.columns())


def _run(state, latents, limit_s, every_s, show):
    """Take steps until the recipe's end or `limit_s`; returns whether it was the end."""
    recipe, made = state.recipe, {}

    def taken(_):
        number, stage = recipe.stage_at(state.step)
        if number not in made:
            made.clear()
            made[number] = _made(latents, stage, recipe.seed, state.device)
        loss, constant = _loss(state.network, made[number], stage, recipe.seed, state.step)
        loss.backward()
        return recipe.rate_at(state.step), loss, constant

    def line(means, seconds):
        loss, constant = means
        return f"stage {next(iter(made))}, loss {loss:.3f}, a constant's {constant:.3f}, {seconds:.3f} s each"

    share = _loop.until(state, recipe.steps)
    return _loop.run(state, share, taken, line, limit_s=limit_s, every_s=every_s, show=show)


@torch.no_grad()
def samples(network, stage, count, *, steps=50, seed=0):
    """Latents float32 [count, 16, T, H, W] that a trained `network` makes of noise, in the size of clips of `stage`."""
    device = next(network.parameters()).device.type
    size = stage.frames, stage.height, stage.width
    # What was compiled was compiled for batches, and for gradients.
    eager = torch.compiler.set_stance("force_eager")
    with torch.autocast(device, torch.bfloat16, enabled=devices.facts(device).CUDA), eager:
        found = network.sample(batch=count, shape=(pattern.CHANNELS, *size), steps=steps, shift=stage.shift, seed=seed)
    return found.latents


def _made(latents, stage, seed, device):
    """All clips of a stage, on `device`."""
    sizes = stage.frames, stage.height, stage.width
    chunks = (range(lo, min(lo + CHUNK, stage.clips)) for lo in range(0, stage.clips, CHUNK))
    return torch.cat([latents(list(indices), *sizes, seed).to(device) for indices in chunks])


def _loss(network, clips, stage, seed, step):
    """``(loss, that of the best constant answer)`` of a step: mean squares of velocities."""
    device, batch = clips.device, stage.batch
    drawn = np.random.default_rng([seed, step])
    chosen = torch.from_numpy(drawn.integers(len(clips), size=batch))
    # One time of each part of the distribution: batches then differ less.
    shares = (np.arange(batch) + drawn.random(batch)) / batch
    sigma = torch.special.ndtri(torch.from_numpy(shares).clamp(1e-6, 1 - 1e-6)).sigmoid()
    # The host does not wait for what the GPU still has to do.
    sigma = rectified_flow.shifted(sigma, stage.shift).float().to(device, non_blocking=True)
    clean = clips[chosen.to(device, non_blocking=True)]
    generator = torch.Generator(device).manual_seed(int(drawn.integers(2**62)))
    noise = torch.randn(clean.shape, generator=generator, device=device)
    point, velocity = rectified_flow.noised(clean, noise, sigma)
    with torch.autocast(device.type, torch.bfloat16, enabled=devices.facts(device.type).CUDA):
        found = network(point, rectified_flow.SCALE * sigma)
    loss = (found.float() - velocity).square().mean()
    return loss, velocity.var(unbiased=False)


def steps_of(path):
    """How many steps weights were trained for that `train` wrote, a file or an index; None for those of others."""
    header = states.header_of(path, KIND)
    return None if header is None else int(header["step"])


def read_recipe(path):
    """The `Recipe` of a JSON file, or of the JSON itself. Raises `ArtifactError` where there is no such file and
    `ConfigError` for its content."""
    return states.read_recipe(path, Recipe)


def write_losses(path, trained):
    """Write the loss of each step as CSV."""
    rows = zip(range(1, len(trained.losses) + 1), trained.losses, trained.constant, strict=True)
    states.write_rows(path, ("step", "loss", "constant"), rows)
