"""Training of networks that name what an image shows: AdamW by the clock or by steps, averaged weights.

`train` is for a whole network; `train_predictor` teaches DynamicViT's predictor which tokens of a trained one to keep.
Images come from a source of `tilewright_study.scenes`, each once, in the order of their numbers. On a GPU products are
in bfloat16, of weights kept in float32.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F

from tilewright import devices
from tilewright.core.errors import ConfigError
from tilewright_study.training import _loop, states
from tilewright_study.training.states import Number, Positive, Share

KIND = "classifier training"
# Steps over which the shares of kept tokens are averaged.
LAST = 20


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a network is trained. batch: images of a step. rate: of learning at its highest, along `_loop.rate` after the
    share `warm_up`. weight_decay: of matrices. norm: of the gradient, at most. average: of the weights of a step in
    what is kept, towards 1 from the first steps on. smoothing: share of the truth that all classes have in common.
    seed: of the images."""

    batch: Positive = 512
    rate: Number = 1e-3
    warm_up: Share = 0.05
    weight_decay: Number = 0.05
    norm: Number = 1.0
    average: Share = 0.999
    smoothing: Share = 0.1


class PredictorRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How DynamicViT's predictor is trained: as `Recipe`, and the weights of its losses as published.

    ratio: of the tokens that are kept, against those that are asked for; answer: of what the whole network says;
    tokens: of what its last tokens are. ASSUME: the other weights stay as they are, so that all pruners prune one and
    the same network; published, they are tuned, too, at a hundredth of the rate.
    """

    batch: Positive = 256
    rate: Number = 1e-3
    warm_up: Share = 0.1
    weight_decay: Number = 0.05
    norm: Number = 1.0
    average: Share = 0.99
    ratio: Number = 2.0
    answer: Number = 0.5
    tokens: Number = 0.5


@dataclass
class Trained:
    """What a training left. path: of the weights. steps, images: those that it took and saw, in `seconds`.

    losses: the loss of each step. kept: of a predictor, the shares of tokens that it kept on average over the last
    steps, after each pruning.
    """

    path: Path
    steps: int
    images: int
    seconds: float
    losses: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)


@_loop.finite()
def train(
    network,
    source,
    recipe: Recipe,
    path,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    first: int = 0,
    compiled: bool = False,
    show: Callable[[str], None] | None = None,
) -> Trained:
    """Train `network`, on its device, and write its averaged weights to `path`, a ``.safetensors`` file.

    source: of task ``classes``; its images of the split ``train`` are read from number `first` on. steps, seconds: when
    it ends, the earlier one. compiled: by ``torch.compile``, for which the clock waits. show: takes lines about the
    progress. The network is left with the averaged weights.

    Raises `ConfigError` for a network of other classes than the source's, or without an end, `TrainingError` where many
    gradients are not finite.
    """
    recipe = states.sound(recipe)
    _check(network, source)
    run = torch.compile(network, dynamic=False) if compiled else network

    def loss_of(images, labels, step):
        with _products(images):
            logits = run(images)
        return (F.cross_entropy(logits.float(), labels, label_smoothing=recipe.smoothing),)

    state = states.State(KIND, network, recipe, Path(path))
    return _run(state, source, recipe, loss_of, _loop.until(state, steps, seconds), first, path, show)


@_loop.finite()
def train_predictor(
    network,
    source,
    recipe: PredictorRecipe,
    path,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    first: int = 0,
    show: Callable[[str], None] | None = None,
) -> Trained:
    """Teach the pruner ``dynamicvit`` of a DeiT which tokens to keep, and write all weights to `path`.

    In training all tokens stay; those that are dropped are hidden from the others, by decisions that are drawn, with
    their gradients straight through. The loss is published: that of the classes, the shares of tokens that are kept
    against those asked for (``keep_ratio`` to the power of each pruning), and how far the answer and the kept tokens
    are from those of the network that keeps all. The rest is as in `train`.
    """
    recipe = states.sound(recipe)
    _check(network, source)
    if network.options.pruner != "dynamicvit":
        raise ConfigError(f"pruner: expected dynamicvit, which has a predictor, found {network.options.pruner}")
    network.requires_grad_(False)
    network.pruner.requires_grad_(True)
    wanted = torch.tensor(network.pruner.counts, device=network.cls_token.device) / (network.options.n_tokens - 1)

    def loss_of(images, labels, step):
        generator = torch.Generator(images.device).manual_seed(step)
        with _products(images):
            with torch.no_grad():
                whole, _, _ = masked(network, images, prune=False)
            found, policy, shares = masked(network, images, generator=generator)
        loss = _predictor_loss(network, recipe, labels, whole, found, policy, shares - wanted[:, None])
        return loss, *shares.mean(1)

    state = states.State(KIND, network, recipe, Path(path), width=1 + len(wanted))
    trained = _run(state, source, recipe, loss_of, _loop.until(state, steps, seconds), first, path, show)
    trained.kept = [sum(shares[-LAST:]) / len(shares[-LAST:]) for shares in state.columns()[1:] if shares]
    return trained


def _run(state, source, recipe, loss_of, share, first, path, show):
    """Take steps until the end and write the weights. loss_of: ``(images, labels, step) -> (loss, numbers…)``."""
    network, device = state.network, state.device
    size, batch = network.options.image_size, recipe.batch

    def read(step):
        start = first + step * batch
        return source.read("train", range(start, start + batch), size, device)

    # What is compiled is so before the clock starts; its gradients are thrown away.
    loss_of(*read(0), 0)[0].backward()
    network.zero_grad(set_to_none=True)
    with ThreadPoolExecutor(1) as reader:
        coming = [reader.submit(read, 0)]

        def taken(done):
            images, labels = coming.pop().result()
            coming.append(reader.submit(read, state.step + 1))
            loss, *numbers = loss_of(images, labels, state.step)
            loss.backward()
            return recipe.rate * _loop.rate(done, recipe.warm_up), loss, *numbers

        def line(means, seconds):
            return f"{state.step * batch:,} images, loss {means[0]:.3f}, {batch / seconds:,.0f} a second"

        _loop.run(state, share, taken, line, show=show)
    state.settle()
    images = state.step * batch
    state.keep(Path(path), lambda x: x.dtype, images=str(images))
    return Trained(Path(path), state.step, images, state.seconds, state.columns()[0])


def _predictor_loss(network, recipe, labels, whole, found, policy, off):
    """See `train_predictor`. whole, found: last tokens [B, N, C] of the network that keeps all, and of the pruned one;
    policy [B, N]: the tokens that stay. off [prunings, B]: shares of tokens, less those asked for."""
    answer, wanted = (network.head(network.norm(x[:, 0].float())) for x in (found, whole))
    loss = F.cross_entropy(answer, labels) + recipe.ratio * off.square().mean()
    loss = loss + recipe.answer * F.kl_div(
        answer.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
    )
    ours, theirs = (network.norm(x[:, 1:].float()) for x in (found, whole))
    distance = ((ours - theirs).square().mean(-1) * policy[:, 1:]).sum() / policy[:, 1:].sum().clamp(min=1)
    return loss + recipe.tokens * distance


def masked(network, images, *, prune=True, generator=None):
    """A DeiT with pruner ``dynamicvit`` as in training, where all tokens stay and dropped ones are hidden.

    ``(tokens [B, N, C], policy float32 [B, N], shares float32 [prunings, B])``: before the last norm; 1 where a token
    stays; of the patches, after each pruning. generator: draws the decisions; None keeps those that are more likely to
    stay than to go. Gradients of decisions are those of their probabilities.
    """
    x = network.patch_embed(images).flatten(2).mT
    x = torch.cat((network.cls_token.expand(len(x), -1, -1), x), dim=1) + network.pos_embed
    policy, shares = torch.ones(x.shape[:2], device=x.device), []
    for number, block in enumerate(network.blocks):
        if prune and number in network.pruner.before:
            # Where no patch is left their mean is that of all, not one of none.
            score = network.pruner.score_predictor[len(shares)](x[:, 1:], policy[:, 1:] + 1e-6)
            policy = torch.cat((policy[:, :1], _drawn(score, generator) * policy[:, 1:]), dim=1)
            shares.append(policy[:, 1:].mean(1))
        heads = block.attn.split(block.norm1(x))
        attended = (
            _attend(*heads, policy)
            if shares
            else F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads)).transpose(1, 2)
        )
        x = x + block.attn.proj(attended.flatten(-2))
        x = x + block.mlp(block.norm2(x))
    return x, policy, torch.stack(shares) if shares else x.new_zeros(0, len(x))


def _drawn(score, generator):
    """1 or 0 for each log-odds of staying, as a draw of two Gumbels decides; the gradient is that of the chance."""
    noise = 0.0
    if generator is not None:
        u = torch.rand(score.shape, generator=generator, device=score.device).clamp(1e-6, 1 - 1e-6)
        # The difference of two Gumbels.
        noise = u.log() - (-u).log1p()
    chance = (score + noise).sigmoid()
    return (chance > 0.5).float() + chance - chance.detach()


def _attend(q, k, v, policy):
    """Attention [B, N, H, D] of q, k, v among the tokens of `policy` [B, N] that stay, and of each to itself."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * q.shape[-1] ** -0.5
    own = torch.eye(policy.shape[1], device=policy.device)
    seen = policy[:, None, None] * (1 - own) + own
    # Not a sum with the logarithm of zero: the gradient of what is hidden has to be finite.
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp() * seen
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)


def _check(network, source):
    """Raise `ConfigError` unless the network names what the source does."""
    found = network.options.num_classes
    if source.task != "classes" or len(source.classes) != found:
        raise ConfigError(
            f"source: expected classes, of the network's {found}, found {source.task} of {len(source.classes)}"
        )


def _products(images):
    return torch.autocast(images.device.type, torch.bfloat16, enabled=devices.facts(images.device.type).CUDA)


def images_of(path):
    """How many images weights were trained on that this module wrote; None for those of others.

    Raises `ArtifactError` for a damaged file.
    """
    if Path(path).suffix != ".safetensors":
        return None
    header = states.header_of(path, KIND)
    return None if header is None else int(header["images"])
