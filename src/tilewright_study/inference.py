"""A network on photographs: what it takes one for, and a picture of what it keeps or attends to, or class maps."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright import devices, networks
from tilewright.core import images, sides
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.masks import _gates
from tilewright_study import labelling
from tilewright_study.cli import settings

# Classes that are printed.
BEST = 5
# When the latency is known well enough.
RSE, RUNS, SECONDS = 0.03, 5, 2.0


@dataclass(frozen=True)
class View:
    """What a part of a network takes of an image. seen: bool [height, width], by pixel. token: top, left and side of
    the query token in pixels, or None where there is no single one."""

    title: str
    seen: np.ndarray
    token: tuple[int, int, int] | None = None


def run(model, image, checkpoint, attention, device, output, labels, token, set, example=False, **mapped):
    """Run the network `model` on a photograph, a name or a path, and say what came out; see ``infer.py --help``.

    A network that labels pixels, or None for the one of `checkpoint`: see `labelling.run`, of which are `mapped`.
    checkpoint: as `networks.create` takes it. attention: the network's attention, or a DeiT's batching; None
    for ``tilewright``, or the first that it has. output: picture
    to write, or None. labels: file with the name of a class on each line, or None. token: ``y,x`` of the query token
    whose attention is drawn, on the grid of the first stage; None for the centre. set: options beyond the name,
    ``key=value``. device: a kind, for the latency. Raises `TilewrightError`.
    """
    # Here, so that the settings of `cli` come before torch.
    import torch

    from tilewright.core.timing import time_call
    from tilewright_study.figures import _photograph, _style

    stated = settings(set, ("attention", "batching", "checkpoint"))
    if model is None or networks.parse(model, stated)[0] in networks.MAPS:
        own = {"--output": output, "--labels": labels, "--token": token}
        if other := [flag for flag, value in own.items() if value is not None]:
            raise ConfigError(f"{other[0]}: expected a network that names classes, found one that labels pixels")
        sources = labelling.sources_of(image, example)
        labelling.run(model, sources, checkpoint, attention, device=device, options=stated, **mapped)
        return
    if example or any(mapped.get(name) is not None for name in ("budget_us", "table", "data", "maps")):
        raise ConfigError(f"--model: expected a network that labels pixels, found {model}, which names classes")
    if image is None:
        raise ConfigError("--image: expected a photograph, found none")
    if output is not None:
        _style.check_suffix(output)
    elif token is not None:
        raise ConfigError("--token: expected --output, the picture to draw it in, found none")
    devices.describe(device)
    family, options = networks.parse(model, stated)
    place = None if token is None else _place(token)
    size = options["image_size"]
    height, width = sides.pair(size)
    pixels = torch.from_numpy(_gates.pixels(image, size))[None]
    what, known = networks.exchanged(family)
    if attention is None:
        attention = "tilewright" if "tilewright" in known else known[0]
    network = networks.create(family, **options, checkpoint=checkpoint, **{what: attention})
    names = None if labels is None else read_labels(labels, network.options.num_classes)
    drawn = [] if output is None else views(family, network, pixels, place)
    network, pixels = network.to(device), pixels.to(device)
    with torch.inference_mode():
        begin = time.perf_counter()
        # On the host, so that a GPU is waited for.
        logits = network(pixels)[0].cpu()
        first = time.perf_counter() - begin
        timing = time_call(lambda: network(pixels).cpu(), min_reps=RUNS, max_seconds=SECONDS, rse_target=RSE)
    print(
        f"{model}, {attention} {what}, one image of {height} x {width}: {timing.p50_us / 1e3:.1f} ms "
        f"(p50 of {timing.repetitions} runs; first call {first:.1f} s)"
    )
    if network.weights is None:
        print("weights: random, for there is no checkpoint; the classes would mean nothing and are left out")
    else:
        best = logits.softmax(0).topk(min(BEST, len(logits)))
        print(f"weights: {network.weights}; most probable classes:")
        for probability, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {probability:7.2%}  {number}" + (f"  {names[number]}" if names else ""))
    if output is not None:
        title = f"{model} on {Path(image).name}" + (", random weights" if network.weights is None else "")
        with _style.context():
            _style.save(_photograph.draw(images.load(image, size), drawn, title), output)
        print(f"{output}: {'; '.join(view.title for view in drawn)}")


def read_labels(path, count):
    """Names of `count` classes, a line each. Raises `ArtifactError` for a file that is missing or has other lines."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: expected the name of a class on each line, found: {error}") from error
    if len(lines) != count:
        raise ArtifactError(f"{path}: expected {count} lines, one for each class, found {len(lines)}")
    return lines


def _place(text):
    try:
        y, x = map(int, text.split(","))
    except ValueError:
        raise ConfigError(f"--token {text}: expected y,x, two whole numbers") from None
    return y, x


def views(family, network, pixels, place=None):
    """Views of a network of `family`: what DynamicViT keeps of the image, what a query token of the others attends to.

    pixels: normalised, [1, 3, height, width]. place: row and column of the query token in the grid of the first stage,
    default the centre. Raises `ConfigError` for a place outside that grid, or none to choose, and where no stage is
    sparse.
    """
    if family == "dynamicvit":
        if place is not None:
            raise ConfigError("--token: DynamicViT's picture shows the kept patches; leave --token out")
        return list(_kept(network, pixels))
    if family == "deit":
        raise ConfigError("--output: a DeiT has dense attention and no picture; leave --output out")
    stages = {"vision_longformer": _longformer_stages, "regionvit": _region_stages}[family](network)
    size = network.options.image_size
    if not stages:
        raise ConfigError(f"no stage is sparse on images of {size} pixels: pass larger images to draw a pattern")
    query = _query(place, size, stages[0])
    return [_attended(stage, query, size) for stage in stages]


def _kept(network, pixels):
    import torch

    options = network.options
    with torch.inference_mode():
        kept = network.kept(pixels)
    for time_, ids in enumerate(kept, start=1):
        rows, columns = options.grid
        seen = np.zeros(rows * columns, bool)
        seen[ids[0].numpy()] = True
        title = f"pruning {time_}: {len(ids[0])} of {len(seen)} patches kept"
        yield View(title, _by_pixel(seen.reshape(rows, columns), options.patch, options.pixels))


@dataclass(frozen=True)
class _Stage:
    """A sparse stage. whole: rows and columns of the grid as its pattern has it, `grid` of them being the image. patch:
    pixels of a token. first: tokens before the grid, and what they are called."""

    number: int
    site: object
    grid: tuple[int, int]
    whole: tuple[int, int]
    patch: int
    first: int
    called: str


def _longformer_stages(network):
    found, patch = [], 1
    for stage in network.stages:
        patch *= stage.shape.patch
        if stage.site is not None:
            windows = stage.windows
            held = windows.grid, windows.whole, patch
            found.append(_Stage(stage.shape.number, stage.site, *held, windows.n_global, "global"))
    return found


def _region_stages(network):
    from tilewright.networks.regionvit import PATCH

    # A single region is full attention.
    return [
        _Stage(i + 1, windows.site, windows.grid, windows.grid, PATCH << i, windows.n_regional, "regional")
        for i, windows in enumerate(stage.windows for stage in network.layers)
        if windows.n_regional > 1
    ]


def _query(place, size, stage):
    """Pixel in the middle of the query token: of the first stage, or of the image."""
    if place is None:
        height, width = sides.pair(size)
        return height // 2, width // 2
    rows, columns = stage.grid
    if not (0 <= place[0] < rows and 0 <= place[1] < columns):
        most = rows - 1 if rows == columns else f"{rows - 1} and {columns - 1}"
        raise ConfigError(f"--token: expected a row and a column from 0 to {most}, found {place}")
    return tuple(stage.patch * at + stage.patch // 2 for at in place)


def _attended(stage, query, size):
    (rows, columns), (tall, wide) = stage.grid, stage.whole
    y, x = min(query[0] // stage.patch, rows - 1), min(query[1] // stage.patch, columns - 1)
    ids = stage.site.graph.row(stage.first + y * wide + x)
    seen = np.zeros(tall * wide, bool)
    local = ids - stage.first
    seen[local[(local >= 0) & (local < len(seen))]] = True
    seen = seen.reshape(tall, wide)[:rows, :columns]
    others = int((local < 0).sum())
    title = f"stage {stage.number}: {seen.sum()} of {seen.size} tokens and {others} {stage.called}"
    return View(title, _by_pixel(seen, stage.patch, size), (y * stage.patch, x * stage.patch, stage.patch))


def _by_pixel(seen, patch, size):
    """Tokens bool [n, m] of `patch` pixels as bool of `size`, a side or (height, width) of pixels.

    Pixels that no token covers are not seen.
    """
    at = (np.minimum(np.arange(side) // patch, n) for side, n in zip(sides.pair(size), seen.shape, strict=True))
    return np.pad(seen, (0, 1))[np.ix_(*at)]
