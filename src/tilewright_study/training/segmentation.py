"""Training of SegFormer on images with labels: AdamW, warm-up and cosine by elapsed share, averaged weights, resumable.

A recipe ends after a number of steps or of minutes. What a step does follows from the recipe, its number and the share
that has elapsed. By steps, a training that was interrupted therefore ends with the weights of one that was not; by
minutes, it goes on with the time that is left.

Gradients go through the folded decoder, whose batch norm stays apart: the same function as the published one, and the
same gradients. On a GPU weights and activations are in bfloat16, of weights kept in float32.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch.func import functional_call

from tilewright import devices
from tilewright.core import _internals, checkpoints
from tilewright.core.errors import ConfigError
from tilewright.masks import segformer as pattern
from tilewright.networks import map_operators, segformer
from tilewright.networks.path import scaled
from tilewright_study.scenes.labels import Labels
from tilewright_study.scenes.sources import VOID
from tilewright_study.training import _graphs, _loop, states, statistics
from tilewright_study.training.states import Number, Positive, Share

KIND = "segmentation training"
# Written weights: matrices, and all others.
SAVED, SAVED_VECTORS = torch.float16, torch.float32
# A split of so many images never repeats; a step of it has at most so many.
ENDLESS, MOST = 1 << 31, 1024


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps until a share of the training has elapsed. sizes: of images, pixels of a side or height and width, taken in
    turn: `batch` images of the largest, and as many more of the others as have as many pixels."""

    until: Share
    # Checked by `train`: msgspec 0.22 crashes where limits stand inside of such a union.
    sizes: tuple[int | tuple[int, int], ...]
    batch: Positive = 32


class Paths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths that are trained beside the full one, each towards its logits (the sandwich rule and in-place distillation
    of Yu and Huang, "Universally Slimmable Networks", 2019).

    begin: the share of the training before which the full path is trained alone: a step of several takes two to three
    times as long. smallest: share of the blocks of each stage, the first ones, that the smallest path of each step
    keeps, at the smallest scale: below it nothing is of use. count: random paths of a step, beside it. whole: share of
    these that keep all blocks of smaller images, which is the cheapest way to save time, and which random sets hardly
    ever are. keep: range from which the share of blocks that the others keep is drawn. levels, scales: what is drawn
    from, all alike: mostly all levels, and smaller images, since tables that were measured hold no other set of levels,
    where early exit comes nearest, and at full size hardly a path without some blocks.
    """

    begin: Share = 0.0
    smallest: Share = 0.5
    count: Positive = 2
    whole: Share = 0.5
    keep: tuple[Share, Share] = (0.5, 1.0)
    levels: tuple[str, ...] = ("1234", "1234", "1234", "1234", "123")
    scales: tuple[float, ...] = (1.0, 0.75, 0.625, 0.5)


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a network is trained.

    rate: of learning, from 0 in a share `warmup` of the training, then to nothing along a cosine. weight_decay: of
    matrices. norm: of the gradient, at most. average: weight of what was before a step in what is kept. drop_path: see
    `segformer.Network.set_drop_path`. stride: of the rows and columns whose pixels a step's loss is of, those of a
    phase that is drawn. paths: None for the full one alone. measured: images of which the batch norm's statistics are
    taken at the end. steps, minutes: where it ends, one of them. seed: of all that is drawn.
    """

    stages: tuple[Stage, ...] = (
        Stage(until=0.35, sizes=(128,), batch=256),
        Stage(until=0.8, sizes=(256,), batch=128),
        Stage(until=1.0, sizes=(512, 256), batch=32),
    )
    rate: Number = 1e-3
    warmup: Share = 0.05
    weight_decay: Number = 0.05
    norm: Number = 1.0
    average: Share = 0.999
    drop_path: Share = 0.1
    stride: Positive = 2
    paths: Paths | None = None
    measured: Positive = 512
    steps: Positive | None = None
    minutes: Annotated[float, msgspec.Meta(gt=0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self):
        ends = [stage.until for stage in self.stages]
        if not ends or ends != sorted(ends) or ends[-1] != 1:
            raise ConfigError(f"stages: expected shares that rise to 1, found {ends}")
        if self.steps is not None and self.minutes is not None:
            raise ConfigError(f"recipe: expected steps or minutes, found {self.steps} and {self.minutes}")

    def rate_at(self, share):
        """The learning rate when a share of the training has elapsed."""
        if share < self.warmup:
            return self.rate * max(share, 1e-3 * self.warmup) / self.warmup
        return self.rate * _loop.rate(share, self.warmup)

    def stage_at(self, share):
        """The stage when a share has elapsed."""
        return next((stage for stage in self.stages if share < stage.until), self.stages[-1])


# As published, but from scratch, at the rate of the head there. ASSUME: most is learned from small images, of which a
# second sees four times as many; the rest of the time is for the sizes that are measured.
PLAIN = Recipe()
# From the weights of `plain`, at a lower rate.
CONTINUED = msgspec.structs.replace(PLAIN, stages=(Stage(until=1.0, sizes=(512, 256), batch=32),), rate=5e-4)
RECIPES = {
    "plain": PLAIN,
    # No branch is left out at random, since paths leave out blocks.
    "sampled": msgspec.structs.replace(CONTINUED, drop_path=0.0, paths=Paths(begin=0.3)),
    # The control of what is said of `sampled`: the same time for the full path alone.
    "continued": CONTINUED,
    # The control of the claim that networks owe their resilience to `drop_path`.
    "depthless": msgspec.structs.replace(PLAIN, drop_path=0.0),
}


@dataclass
class Trained:
    """What a training left. path: of the averaged weights. done: whether it came to the recipe's end. seconds: that it
    took in all. log: for each step its loss, that of its paths, its images and its rate, lists of floats. left_out:
    steps since the training went on whose gradients were not finite."""

    path: Path
    done: bool
    seconds: float
    log: dict[str, list[float]]
    left_out: int = 0

    @property
    def images(self) -> int:
        """How many images were seen."""
        return int(sum(self.log["images"]))


@_loop.finite()
def train(
    network,
    source,
    recipe: Recipe,
    path,
    *,
    limit_s: float | None = None,
    every_s: float = 300.0,
    compiled: bool = False,
    show: Callable[[str], None] | None = None,
) -> Trained:
    """Train a SegFormer on the split ``train`` of a source, on its device, and write its averaged weights to `path`.

    path: a ``.safetensors`` file, or an ``.index.json`` beside several. limit_s: stop after so many seconds, and write
    the averages so far; the next call with the same arguments goes on. every_s: how often the state is written, beside
    `path` until the end. compiled: the full path's step, and for other paths each block and the decoder, by
    ``torch.compile``. On a GPU the full path's step and those of paths that come again are recorded in CUDA graphs. The
    time that both take does not count. show: takes lines about the progress. The network is left with the averaged
    weights, and with statistics of its batch norm that were measured with them.

    Raises `ConfigError` for a source, a network, a recipe or a path that cannot be trained with, `ArtifactError` for a
    state of another recipe, network or source, `TrainingError` where many gradients are not finite.
    """
    recipe = states.sound(recipe)
    _check(network, source, recipe)
    path = Path(path)
    data = states.facts_of(source, sides(recipe.stages[0].sizes[0]))
    state = states.State(KIND, network, recipe, path, width=4, data=data)
    state.resume()
    step = _Step(network, source, recipe, compiled)
    network.train()
    network.set_drop_path(recipe.drop_path)
    try:
        with _tuned(step.lowered), step.reader, step.parts_compiled(), state.kept():
            done = _run(state, step, recipe, limit_s, every_s, show)
    finally:
        network.set_drop_path(0.0)
        network.eval()
    state.settle()
    indices = range(min(recipe.measured, source.count("train")))
    statistics.use(network, statistics.measured(network, source, "train", indices))
    header = {"seconds": f"{state.seconds:.1f}", "images": str(round(sum(x[2].item() for x in state.told)))}
    header["labels"] = states.text(Labels(source.classes, getattr(getattr(source, "labels", None), "palette", ())))
    state.keep(path, _saved, **header)
    if done:
        state.path.unlink(missing_ok=True)
    names = ("loss", "paths", "images", "rate")
    log = dict(zip(names, state.columns(), strict=True))
    return Trained(path, done, state.seconds, log, int(state.left_out))


def _run(state, step, recipe, limit_s, every_s, show):
    """Take steps until the recipe's end or `limit_s`; returns whether it was the end."""
    if step.compiled or step.graphs:
        begin = perf_counter()
        step.warm()
        took = perf_counter() - begin
        limit_s = None if limit_s is None else limit_s - took
        if show is not None:
            show(f"{'compiled' if step.compiled else 'recorded'} in {took:.0f} s")

    def taken(share):
        loss, beside, images = step(state.step, share)
        rate = recipe.rate_at(share)
        return rate, loss, beside, float(images), rate

    def line(means, seconds):
        loss, distilled, images, rate = means
        beside = f", of paths {distilled:.3f}" if recipe.paths else ""
        return f"loss {loss:.3f}{beside}, rate {rate:.1e}, {images / seconds:.0f} images/s"

    share = _loop.until(state, recipe.steps, recipe.minutes and 60 * recipe.minutes)
    return _loop.run(state, share, taken, line, limit_s=limit_s, every_s=every_s, show=show)


class _Step:
    """Losses and gradients of one step."""

    def __init__(self, network, source, recipe, compiled):
        self.network, self.source, self.recipe, self.compiled = network, source, recipe, compiled
        self.device = next(network.parameters()).device
        # A GPU computes in 16 bits, and the host runs ahead of it.
        self.lowered = devices.facts(self.device.type).CUDA
        self.dtype = torch.bfloat16 if self.lowered else torch.float32
        self.labelled = torch.compile(self._labelled, dynamic=False) if compiled else self._labelled
        self.smallest = _smallest(network, recipe.paths) if recipe.paths else None
        # Of the full path, and of the other paths that are recorded.
        self.graphs = _graphs.Graphs(network.parameters()) if self.lowered else None
        self.recorded = self._repeated() if self.graphs and recipe.paths else ()
        self.reader, self.coming = ThreadPoolExecutor(1), {}
        # Scenes are drawn beside a step: the reader would wait for its end on the same stream.
        self.stream = torch.cuda.Stream(self.device) if self.lowered else None

    def __call__(self, step, share):
        """``(loss, mean loss of paths, images)``; gradients are left in the weights."""
        images, labels = self._batch(step, share)
        drawn = np.random.default_rng([self.recipe.seed, step])
        torch.manual_seed(int(drawn.integers(2**62)))
        if self.source.count("train") < ENDLESS:
            images, labels = augmented(images, labels, drawn)
        loss, maps = self._loss(images, labels, drawn)
        losses = []
        if self.recipe.paths and share >= self.recipe.paths.begin:
            losses = self._distilled(images, maps, self._paths(drawn))
        return loss, torch.stack(losses).mean() if losses else torch.zeros_like(loss), len(images)

    def warm(self):
        """Compile what is compiled, and record what is recorded, for all sizes."""
        asked = [(stage, sides(size)) for stage in self.recipe.stages for size in stage.sizes]
        for size, count in dict.fromkeys((size, images_of(stage, size)) for stage, size in asked):
            images = torch.randn(count, 3, *size, device=self.device, dtype=self.dtype)
            labels = torch.zeros(count, *size, dtype=torch.uint8, device=self.device)
            _, maps = self._loss(images, labels, np.random.default_rng(0))
            if self.recipe.paths:
                with self._leaves() as weights:
                    for path in self._kinds():
                        self._apart(images, maps, path, weights).backward()
                self._distilled(images, maps, self.recorded)
            self.network.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def parts_compiled(self):
        """Within, parts of the network are compiled, where paths are trained that share them."""
        if not self.compiled or self.recipe.paths is None:
            yield
            return
        # fullgraph: beyond its limit of forms torch would otherwise run uncompiled, without a warning.
        with (
            _internals.recompile_limit(),
            self.network.parts_compiled(dynamic=False, fullgraph=True),
        ):
            yield

    def _batch(self, step, share):
        """Images and labels of a step; those of the next one are read meanwhile."""
        asked = self._asked(step, share)
        reading = self.coming.pop(asked, None) or self._reading(*asked)
        following = self._asked(step + 1, share)
        self.coming = {following: self._reading(*following)}
        images, labels, drawn = reading.result()
        if drawn is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(drawn)
            for x in (images, labels):
                x.record_stream(current)
        return images.to(self.dtype), labels

    def _asked(self, step, share):
        """Step, size and count of images that a step reads."""
        stage = self.recipe.stage_at(share)
        size = sides(stage.sizes[step % len(stage.sizes)])
        return step, size, images_of(stage, size)

    def _reading(self, step, size, count):
        indices = chosen(self.source.count("train"), step, count, self.recipe.seed)
        return self.reader.submit(self._read, indices, size)

    def _read(self, indices, size):
        """Images, labels, and on a GPU the event after which they are there."""
        # The stream that is current is one of the thread.
        with torch.cuda.stream(self.stream):
            images, labels = self.source.read("train", indices, size, self.device)
            return images, labels, self.stream and self.stream.record_event()

    def _loss(self, images, labels, drawn):
        """``(loss, maps)`` of the full path, over the pixels of a phase; gradients are left in the weights."""
        stride, size = self.recipe.stride, images.shape[2:]
        phases = [int(drawn.integers(min(stride, side))) for side in size]
        grid = pattern.grids(tuple(size))[0]
        dtype = images.dtype
        spread = (
            map_operators.interpolation(side, whole, dtype, self.device) for side, whole in zip(grid, size, strict=True)
        )
        rows, columns = (x[phase::stride] for x, phase in zip(spread, phases, strict=True))
        labels = labels[:, phases[0] :: stride, phases[1] :: stride].long()
        return self._differentiated("", self.labelled, images, labels, rows, columns)

    def _labelled(self, images, labels, rows, columns):
        maps = self._maps(images)
        logits = map_operators.spread(maps, rows, columns).permute(0, 2, 3, 1)
        loss = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), ignore_index=VOID)
        return loss, maps.detach()

    def _distilled(self, images, maps, wanted):
        """Losses of paths towards the full path's maps of logits; their gradients join those of the weights."""
        losses = []
        with self._leaves() as weights:
            for path in wanted:
                if path in self.recorded:
                    (loss,) = self._differentiated(str(path), self._towards(path), images, maps)
                else:
                    loss = self._apart(images, maps, path, weights)
                    loss.backward()
                # The next graph may write where this one left its loss.
                losses.append(loss.detach().clone())
        return losses

    def _towards(self, path):
        """A function of images and of the full path's maps: ``(loss,)`` of a path, of the weights themselves."""
        return lambda images, maps: (self._apart(images, maps, path, self._lower()),)

    def _apart(self, images, maps, path, weights):
        """The loss of a path of `weights`: how far its logits are from the full path's."""
        found = functional_call(self.network, weights, (images, path))
        found, wanted = (x.permute(0, 2, 3, 1).flatten(0, 2).float() for x in (found, maps))
        return -(wanted.softmax(1) * found.log_softmax(1)).sum(1).mean()

    def _differentiated(self, name, function, *inputs):
        """What ``function(*inputs)`` returns, its loss first, whose gradients join those of the weights.

        name: of the path that it runs.
        """
        if self.graphs:
            return self.graphs((name, inputs[0].shape), function, *inputs)
        loss, *others = function(*inputs)
        loss.backward()
        return loss.detach(), *others

    def _maps(self, images):
        """Maps of logits of the full path, of the weights in the type of the images."""
        if not self.lowered:
            return self.network(images)
        return functional_call(self.network, self._lower(), (images,))

    def _lower(self):
        """The weights by name, in the type of images; their gradients are the weights' own."""
        return self._rounded(lambda x: x.to(self.dtype))

    def _rounded(self, made):
        """The weights by name, as ``made(x)`` rounds them. The batch norm's stay in 32 bits, as its sums do."""
        return {name: x if ".bn." in name else made(x) for name, x in self.network.named_parameters()}

    @contextlib.contextmanager
    def _leaves(self):
        """The weights of a step's paths by name, in the type of its images; their gradients join the network's.

        All paths of a step share them: each would otherwise make its own, and gradients in 32 bits of them.
        """
        own = dict(self.network.named_parameters())
        weights = self._rounded(lambda x: x.detach().to(self.dtype).requires_grad_()) if self.lowered else own
        yield weights
        for name, x in weights.items():
            if x is not own[name] and x.grad is not None:
                own[name].grad.add_(x.grad)

    def _kinds(self):
        """All that paths of a step differ by but for their blocks."""
        return self._wholes(self.recipe.paths.scales, (*self.recipe.paths.levels, self.smallest.levels))

    def _wholes(self, scales, levels):
        """The paths of these scales and levels that keep all blocks, each once."""
        for scale, kept in itertools.product(dict.fromkeys(map(float, scales)), dict.fromkeys(levels)):
            yield self.network.path(msgspec.structs.replace(self.network.path(), levels=kept, scale=scale))

    def _repeated(self):
        """The paths that come again and again: the smallest one, and those with all blocks of smaller images."""
        return [self.smallest, *self._wholes(_smaller(self.recipe.paths), self.recipe.paths.levels)]

    def _paths(self, drawn):
        """The smallest path, and random ones."""
        asked = self.recipe.paths
        yield self.smallest
        full = self.network.path()
        smaller = _smaller(asked)
        for _ in range(asked.count):
            whole = drawn.random() < asked.whole
            keep, scales = (1.0, smaller) if whole else (drawn.uniform(*asked.keep), asked.scales)
            blocks = tuple("".join("01"[int(drawn.random() < keep)] for _ in stage) for stage in full.blocks)
            levels, scale = asked.levels[drawn.integers(len(asked.levels))], scales[drawn.integers(len(scales))]
            yield self.network.path(msgspec.structs.replace(full, blocks=blocks, levels=levels, scale=float(scale)))


def _smallest(network, asked):
    """The smallest path of each step."""
    counts = (max(1, math.ceil(asked.smallest * depth)) for depth in network.options.depths)
    return network.path(f"{'.'.join(map(str, counts))} scale={min(asked.scales)}")


def _smaller(asked):
    """The scales of random paths that keep all blocks: those below 1, where there are any."""
    return [scale for scale in asked.scales if scale < 1] or asked.scales


def sides(size):
    """Height and width of a size."""
    return (size, size) if isinstance(size, int) else tuple(size)


def images_of(stage, size):
    """How many images of a size a step of a stage has: about the pixels of `batch` images of the largest one."""
    largest = max(math.prod(sides(each)) for each in stage.sizes)
    return max(1, stage.batch * largest // math.prod(size))


def chosen(count, step, images, seed):
    """Indices of the images of a step, of a split of `count`: none twice where they are endless."""
    if count >= ENDLESS:
        return [step * MOST + at for at in range(images)]
    drawn = np.random.default_rng([seed, step, 1])
    return drawn.choice(count, images, replace=images > count).tolist()


def augmented(images, labels, drawn):
    """Images and labels, each image at another scale and place, half of them mirrored; `VOID` where there is nothing.

    drawn: NumPy's generator, from which they follow.
    """
    count = len(images)
    # Sides of what is shown, in those of the image: at most twice as much, at least half.
    share = np.exp(drawn.uniform(-math.log(2), math.log(2), count))
    middle = (1 - share)[:, None] * drawn.uniform(-1, 1, (count, 2))
    places = np.zeros((count, 2, 3))
    places[:, 0, 0], places[:, 1, 1] = share * drawn.choice([-1, 1], count), share
    places[:, :, 2] = middle
    grid = F.affine_grid(torch.from_numpy(places).float(), [count, 1, *images.shape[2:]], align_corners=False)
    grid = grid.to(images.device)
    moved = F.grid_sample(images.float(), grid, align_corners=False).to(images.dtype)
    # Labels count from 1 meanwhile, since nothing is 0 there.
    kept = F.grid_sample(labels[:, None].float() + 1, grid, mode="nearest", align_corners=False)[:, 0] - 1
    return moved, torch.where(kept < 0, VOID, kept).to(labels.dtype)


@contextlib.contextmanager
def _tuned(lowered):
    """Have cuDNN choose the fastest of its convolutions, where there are any."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or lowered
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _saved(x):
    """The type in which a tensor of weights is written."""
    if not x.is_floating_point():
        return x.dtype
    return SAVED if x.ndim > 1 else SAVED_VECTORS


def _check(network, source, recipe):
    if recipe.steps is None and recipe.minutes is None:
        raise ConfigError("recipe: expected steps or minutes, after which it ends, found neither")
    if not hasattr(network, "set_drop_path"):
        raise ConfigError(f"network: expected a SegFormer to train, found {type(network).__module__}")
    classes = network.options.num_classes
    if source.task != "maps" or len(source.classes) != classes:
        found = f"{source.task} of {len(source.classes)}"
        raise ConfigError(f"source: expected maps of the network's {classes} classes, found {found}")
    # Paths resize what they are given.
    scales = [1.0]
    if recipe.paths:
        scales += recipe.paths.scales
    least = network.options.least
    for stage in recipe.stages:
        for size in stage.sizes:
            if (found := min(scaled(sides(size), min(scales)))) < least:
                raise ConfigError(
                    f"stages: expected images of at least {least} pixels a side, found {found}: {size} x {min(scales)}"
                )
            if (count := images_of(stage, sides(size))) > MOST:
                raise ConfigError(f"stages: expected at most {MOST} images a step, found {count}")


def labels_of(path) -> Labels | None:
    """The classes of weights that were trained here, with their colours; None of others. Raises `ArtifactError`."""
    header = states.header_of(path, KIND)
    return msgspec.json.decode(header["labels"], type=Labels) if header and "labels" in header else None


def start(network, path):
    """Load weights that a training goes on from; where they are of other classes, the last layer stays as it is.

    Raises `ArtifactError`.
    """
    own = network.state_dict()
    head = ("decode_head.linear_pred.weight", "decode_head.linear_pred.bias")

    def adapt(state, made):
        state = segformer.adapt(state, made)
        others = [name for name in head if name in state and state[name].shape != own[name].shape]
        return state | {name: own[name] for name in others}

    checkpoints.load(network, path, adapt)


def read_recipe(path):
    """The `Recipe` of a name of `RECIPES`, of a JSON file, or of the JSON itself.

    Raises `ArtifactError` where there is no such file and `ConfigError` for its content.
    """
    if str(path) in RECIPES:
        return RECIPES[str(path)]
    return states.read_recipe(path, Recipe, RECIPES)


def write_log(path, trained: Trained) -> None:
    """Write a row for each step as CSV: images seen so far, rate of learning, loss, and that of paths."""
    log = trained.log
    images = np.cumsum(log["images"]).astype(int).tolist()
    values = zip(log["rate"], log["loss"], log["paths"], strict=True)
    rows = [(at + 1, images[at], *(f"{x:.6g}" for x in row)) for at, row in enumerate(values)]
    states.write_rows(path, ("step", "images", "rate", "loss", "paths"), rows)
