"""Training of video networks by rectified flow: AdamW on clips of growing size, averaged weights, resumable.

What a step does follows from the recipe and its number alone, so that a training that was interrupted ends with the
weights of one that was not. Gradients go through dense attention.
"""

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tilewright import targets
from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.models import wan as pattern
from tilewright.networks import _flow

KIND, VERSION = "video training", "1"
# Written weights: half the bytes, and what a GPU computes with.
SAVED = torch.bfloat16
# Clips that are made at once.
CHUNK = 64
# Bytes of a file, of weights that are written in several.
PART_BYTES = 15 << 20
# Seconds between two lines about the progress.
SHOWN_S = 10.0

Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]
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
    seed: int = 0

    def __post_init__(self):
        if not self.stages:
            raise ConfigError("stages: expected at least one, found none")

    @property
    def steps(self):
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

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
        Stage(steps=3000, batch=64, clips=4096, frames=5, height=16, width=28),
        Stage(steps=1400, batch=16, clips=2048, frames=9, height=30, width=52, shift=1.5),
        Stage(steps=300, batch=1, clips=128, frames=21, height=60, width=104, shift=3.0),
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


def train(
    network, latents: Callable, recipe: Recipe, path, *, limit_s=None, every_s=120.0, compiled=False, show=None
) -> Trained:
    """Train `network`, on its device, and write its averaged weights to `path`, a ``.safetensors`` file, or an
    ``.index.json`` beside several of at most `PART_BYTES`.

    latents: ``latents(indices, frames, height, width, seed) -> float32 [n, 16, frames, height, width]``, the clips of
    these numbers. limit_s: stop after so many seconds, and write the averages so far; the next call with the same
    arguments goes on. every_s: how often the state is written, which is beside `path` until the end,
    ``<stem>.state.safetensors``. compiled: its layers, by ``torch.compile``. show: takes lines about the progress. On a
    GPU products are in bfloat16. The network is left with the averaged weights.

    Raises `ConfigError` for a network that cannot be trained, `ArtifactError` for a state of another recipe.
    """
    if network.attention != "dense":
        raise ConfigError(f"attention: expected dense, through which gradients go, found {network.attention!r}")
    path = Path(path)
    state = _State(network, recipe, path.with_name(f"{_stem(path)}.state.safetensors"))
    state.resume()
    begin = saved = perf_counter()
    shown = begin, state.step
    if compiled:
        network.compile_layers(dynamic=False)
    first = 0
    for number, stage in enumerate(recipe.stages, 1):
        clips = None
        for step in range(max(first, state.step), first + stage.steps):
            now = perf_counter()
            if limit_s is not None and now - begin > limit_s:
                state.write()
                state.keep(path)
                return Trained(path, False, *state.curves())
            if now - saved > every_s:
                state.write()
                saved = perf_counter()
            if clips is None:
                clips = _made(latents, stage, recipe.seed, state.device)
            state.take(*_loss(network, clips, stage, recipe.seed, step))
            if show is not None and now - shown[0] > SHOWN_S:
                show(f"stage {number}, {state.told(*shown)}, {now - begin:.0f} s")
                shown = perf_counter(), state.step
        first += stage.steps
    state.keep(path)
    state.path.unlink(missing_ok=True)
    return Trained(path, True, *state.curves())


@torch.no_grad()
def samples(network, stage, count, *, steps=50, seed=0):
    """Latents float32 [count, 16, T, H, W] that a trained `network` makes of noise, in the size of clips of `stage`."""
    device = next(network.parameters()).device.type
    size = stage.frames, stage.height, stage.width
    # What was compiled was compiled for batches, and for gradients.
    eager = torch.compiler.set_stance("force_eager")
    with torch.autocast(device, torch.bfloat16, enabled=targets.facts(device).CUDA), eager:
        found = network.sample(batch=count, shape=(pattern.CHANNELS, *size), steps=steps, shift=stage.shift, seed=seed)
    return found.latents


def _stem(path):
    """The name of a file of weights without its ending."""
    return path.name.removesuffix(".index.json").removesuffix(".safetensors")


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
    sigma = _flow.shifted(sigma, stage.shift).float().to(device, non_blocking=True)
    clean = clips[chosen.to(device, non_blocking=True)]
    generator = torch.Generator(device).manual_seed(int(drawn.integers(2**62)))
    noise = torch.randn(clean.shape, generator=generator, device=device)
    point, velocity = _flow.noised(clean, noise, sigma)
    with torch.autocast(device.type, torch.bfloat16, enabled=targets.facts(device.type).CUDA):
        found = network(point, _flow.SCALE * sigma)
    loss = (found.float() - velocity).square().mean()
    return loss, velocity.var(unbiased=False)


class _State:
    """All that a training goes on from: weights, their averages, the optimiser's moments, the losses so far."""

    def __init__(self, network, recipe, path):
        self.network, self.recipe, self.path = network, recipe, path
        self.names, self.weights = zip(*network.named_parameters(), strict=True)
        self.device = self.weights[0].device
        matrices = [x for x in self.weights if x.ndim > 1 and x.shape[0] > 1]
        others = [x for x in self.weights if not any(x is y for y in matrices)]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=self.weights[0].is_cuda)
        self.averages = [x.detach().clone() for x in self.weights]
        self.step, self.losses = 0, []

    def take(self, loss, constant):
        """One step down the gradient of a loss."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.norm)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        weight = min(self.recipe.average, self.step / (self.step + 10))
        with torch.no_grad():
            get_ema_multi_avg_fn(weight)(self.averages, [x.detach() for x in self.weights], self.step)
        # Read later: the host would wait for each step.
        self.losses.append(torch.stack((loss.detach(), constant)))

    def curves(self):
        """Losses, and those of constant answers, as lists."""
        return torch.stack(self.losses).T.tolist() if self.losses else ([], [])

    def told(self, when, before):
        """A line about the steps since `before`, at the time `when`. Waits for them."""
        loss, constant = torch.stack(self.losses[before - self.step :]).mean(0).tolist()
        seconds = (perf_counter() - when) / (self.step - before)
        losses = f"loss {loss:.3f}, a constant's {constant:.3f}"
        return f"step {self.step} of {self.recipe.steps}, {losses}, {seconds:.3f} s each"

    def write(self):
        """Write all of it, whole, to its file."""
        tensors = {f"weights.{name}": x for name, x in zip(self.names, self.weights, strict=True)}
        tensors |= {f"average.{name}": x for name, x in zip(self.names, self.averages, strict=True)}
        for name, x in zip(self.names, self.weights, strict=True):
            tensors |= {f"{moment}.{name}": value for moment, value in self.optimiser.state[x].items()}
        if self.losses:
            tensors["losses"] = torch.stack(self.losses)
        header = {"step": str(self.step), "recipe": _text(self.recipe)}
        _save({name: x.detach() for name, x in tensors.items()}, self.path, header)

    def resume(self):
        """Go on from the file, where there is one. Raises `ArtifactError`."""
        if not self.path.exists():
            return
        header, tensors = _read(self.path)
        if header.get("recipe") != _text(self.recipe):
            raise ArtifactError(
                f"{self.path}: expected a training by the recipe {_text(self.recipe)}, found {header.get('recipe')}; "
                "remove the file to begin anew"
            )
        try:
            with torch.no_grad():
                for kind, kept in (("weights", self.weights), ("average", self.averages)):
                    for name, x in zip(self.names, kept, strict=True):
                        x.copy_(tensors.pop(f"{kind}.{name}"))
        except (KeyError, RuntimeError) as error:
            raise ArtifactError(f"{self.path}: expected a training of this network, found another: {error}") from error
        self.step = int(header["step"])
        self.losses = list(tensors.pop("losses", torch.empty(0, 2)).to(self.device))
        owners = dict(zip(self.names, self.weights, strict=True))
        for key, value in tensors.items():
            moment, _, name = key.partition(".")
            # Where AdamW keeps it: the count of its steps on the host, unless it is fused.
            place = self.device if value.ndim or self.weights[0].is_cuda else "cpu"
            self.optimiser.state[owners[name]][moment] = value.to(place)

    def keep(self, path):
        """Leave the averages in the network and at `path`, which says of how many steps they are."""
        with torch.no_grad():
            for x, average in zip(self.weights, self.averages, strict=True):
                x.copy_(average)
        state = {name: x.detach().to(SAVED) for name, x in self.network.state_dict().items()}
        header = {"step": str(self.step), "recipe": _text(self.recipe)}
        if path.suffix != ".json":
            _save(state, path, header)
            return
        names, parts = {}, _parts(state)
        for at, part in enumerate(parts, 1):
            name = f"{_stem(path)}-{at:05}-of-{len(parts):05}.safetensors"
            _save(part, path.with_name(name), header)
            names |= dict.fromkeys(part, name)
        artifacts.write_text(path, json.dumps({"metadata": header, "weight_map": names}, indent=1) + "\n")


def _parts(state):
    """`state` in dicts of at most `PART_BYTES`, each of one tensor at least."""
    parts, held = [], PART_BYTES
    for name, x in state.items():
        if held + x.nbytes > PART_BYTES:
            parts.append({})
            held = 0
        parts[-1][name] = x
        held += x.nbytes
    return parts


def _text(recipe):
    return msgspec.json.encode(recipe).decode()


def _save(tensors, path, header):
    with artifacts.atomic(path) as temporary:
        held = {name: x.contiguous().cpu() for name, x in tensors.items()}
        save_file(held, temporary, {"kind": KIND, "version": VERSION, **header})


def _read(path):
    """``(header, tensors)`` of a file that `_save` wrote. Raises `ArtifactError`."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            found = header.get("kind"), header.get("version")
            if found != (KIND, VERSION):
                raise ArtifactError(f"{path}: expected {KIND} version {VERSION}, found {found[0]} version {found[1]}")
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except ArtifactError:
        raise
    except Exception as error:
        # safetensors' own error is of a class that it does not export.
        raise ArtifactError(f"{path}: expected a {KIND} file, found a damaged one: {error}") from error


def steps_of(path):
    """How many steps weights were trained for that `train` wrote, a file or an index; None for those of others."""
    path = Path(path)
    try:
        if path.suffix == ".json":
            header = json.loads(path.read_text(encoding="utf-8")).get("metadata", {})
            return int(header["step"]) if "recipe" in header else None
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
        return int(header["step"]) if header.get("kind") == KIND else None
    except Exception as error:
        raise ArtifactError(f"{path}: expected weights, found a damaged file: {error}") from error


def read_recipe(path):
    """The `Recipe` of a JSON file, or of the JSON itself. Raises `ArtifactError` where there is no such file and
    `ConfigError` for its content."""
    try:
        text = path.encode() if str(path).startswith("{") else Path(path).read_bytes()
        return msgspec.json.decode(text, type=Recipe)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a recipe") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: expected a recipe: {error}") from error


def write_losses(path, trained):
    """Write the loss of each step as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("step", "loss", "constant"))
    writer.writerows(zip(range(1, len(trained.losses) + 1), trained.losses, trained.constant, strict=True))
    artifacts.write_text(path, text.getvalue())
