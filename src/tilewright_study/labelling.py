"""Class maps of photographs, and these in colours over the photographs: a file, a folder or the example."""

import math
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

from tilewright import devices, networks
from tilewright.core import artifacts, images
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, need
from tilewright_study import map_evaluation
from tilewright_study.scenes import labels as records

# How an image of another shape than the network's comes to it.
FITS = ("stretch", "aspect", "slide")
# Windows that slide go on by this share of their sides at most.
STEP = 2 / 3
# Calls of each path that promises are made of, and where there is no budget.
CALLS, FEW = 30, 3
# Runners that are kept, one for each size of frames.
KEPT = 4
# Endings of weights that hold their classes, where they were trained here.
HEADED = (".safetensors", ".json")
# Classes that are named for each image.
NAMED = 3


def run(model, sources, checkpoint, attention, *, device, dtype, budget_us, table, fit, data, blend, maps, options):
    """Label images, ``{name: file}``, and write what was found; see ``infer.py --help``.

    Raises `TilewrightError`, for images that could not be labelled once all others are.
    """
    import torch

    from tilewright_study.training import segmentation

    if fit not in FITS:
        raise ConfigError(f"--fit: expected one of {', '.join(FITS)}, found {fit!r}")
    if fit == "aspect" and table is not None:
        raise ConfigError(
            "--table: its paths are of one size of the network; expected --fit stretch or slide, found aspect"
        )
    if dtype not in (known := ("float32", "float16", "bfloat16")):
        raise ConfigError(f"--dtype: expected one of {', '.join(known)}, found {dtype!r}")
    devices.describe(device)
    place, record = devices.facts(device).TORCH_DEVICE, None if data is None else records.read(data)
    if record is not None and checkpoint is None:
        options.setdefault("num_classes", len(record.classes))

    network = _network(model, checkpoint, attention, options).to(place, getattr(torch, dtype))
    count = network.options.num_classes
    if record is None and Path(network.weights or "").suffix in HEADED:
        record = segmentation.labels_of(network.weights)
    if record is None:
        record = records.Labels(tuple(_distinct(network.labels)) or tuple(str(number) for number in range(count)))
    elif len(record.classes) != count:
        raise ConfigError(f"--data: expected {count} classes of the network, found {len(record.classes)}")
    print(f"weights: {network.weights or 'random, for there is no checkpoint'}; {count} classes")
    labelled, refused, shown = _Labelled(network, fit, table, budget_us), [], False
    stems = [Path(name).stem for name in sources]
    for name, file in sources.items():
        try:
            image = images.rgb(file)
            found, took_us, path = labelled(np.array(image))
        except (ArtifactError, PatternError) as error:
            refused.append(name)
            print(f"{name}: {error}", file=sys.stderr)
            continue
        shares = np.bincount(found.ravel(), minlength=count) / found.size
        best = ", ".join(f"{record.classes[at]} {shares[at]:.0%}" for at in np.argsort(-shares)[:NAMED] if shares[at])
        print(f"{name}, {found.shape[0]} x {found.shape[1]}: {took_us / 1e3:.1f} ms, {path}: {best}")
        if not shown:
            shown = True
            print(labelled.parts())
        if maps is not None:
            stem = Path(name).stem
            _write(Path(maps), stem if stems.count(stem) == 1 else name, image, found, record.colours, blend)
    if refused:
        raise ArtifactError(
            f"expected images, found {len(refused)} of {len(sources)} that are none: {', '.join(refused[:5])}"
        )


def sources_of(image, example):
    """``{name: file}`` of the photograph, file or folder `image`, or of the example. Raises `TilewrightError`."""
    if (image is None) != example:
        found = "both" if example else "neither"
        raise ConfigError(f"--image: expected a photograph, a file or a folder, or --example, found {found}")
    if example:
        from tilewright_study.scenes import pictures

        return {name: images.carried(photograph) for name, photograph in pictures.EXAMPLE.items()}
    if Path(image).is_dir():
        return {file.name: file for file in images.files_of(image)}
    return {Path(image).name: images.path(image)}


class _Labelled:
    """Class maps of images of any size by one network: a `FrameRunner` for each size, or a `Runner` of windows."""

    def __init__(self, network, fit, table, budget_us):
        from tilewright.paths import load

        self.network, self.fit, self.budget_us = network, fit, budget_us
        self.table = None if table is None else load(table, joint=fit != "slide")
        self.runners, self.last, self.said = {}, None, ""

    def __call__(self, pixels):
        """``(map, microseconds, path)`` of uint8 [H, W, 3]: uint8 [H, W], and what ran."""
        if self.fit == "slide":
            return self._slid(pixels)
        found, told = self._runner(pixels)(pixels, self._budget())
        return found.cpu().numpy(), told.took_us, told.path

    def _slid(self, pixels):
        """As a call: logits are averaged over windows, as the evaluation of networks does it."""
        from tilewright.paths import frames

        own, size, told = self.network.options.pixels, pixels.shape[:2], []
        # The smallest image that a window of the network's size fits into.
        side = math.ceil(min(size) * max(a / b for a, b in zip(own, size, strict=True)))

        def resized():
            return map_evaluation.image_of(self.network, pixels, side, most=math.inf)

        runner = self._of_windows(resized()[:, :, : own[0], : own[1]])
        begin = perf_counter()
        image, stride = resized(), max(1, int(STEP * min(own)))
        count = len(map_evaluation.windows(image.shape[2:], own, stride))

        def call(views):
            maps, one = runner(views, self._budget() / count)
            told.append(one)
            return maps

        logits = map_evaluation.windowed(call, image, own, stride, 1)
        found = frames.labels(logits, size)[0].cpu().numpy()
        self.said = f"windows: {count} of {own[0]} x {own[1]}, {stride} apart"
        return found, 1e6 * (perf_counter() - begin), told[0].path

    def parts(self):
        """What is said of the parts of the latest call."""
        from tilewright.paths import PARTS

        if self.said:
            return self.said
        row = self.last.table.rows[-1]
        parts = (f"{name.removesuffix('_us').replace('_', ' ')} {getattr(row, name) / 1e3:.2f}" for name in PARTS)
        return f"parts of {row.path}, ms: {', '.join(parts)}; promise {row.promise_us / 1e3:.2f}"

    def _budget(self):
        return 1e12 if self.budget_us is None else self.budget_us

    def _of_windows(self, images):
        from tilewright.paths import Runner, frames, runner

        if self.last is None:
            # What labels pixels on a CPU is compiled or read in its first call.
            frames.labels(images.new_zeros(1, 1, 2, 2), (2, 2))
            self.last = Runner(self.network, self.table or runner.whole(self.network), late="fastest")
            self.last.rehearse(images, FEW if self.budget_us is None else CALLS)
        return self.last

    def _runner(self, pixels):
        import torch

        from tilewright.paths import FrameRunner

        if (size := pixels.shape[:2]) not in self.runners:
            options = self.network.options
            kept = map_evaluation.sized(size, min(options.pixels), options.least) if self.fit == "aspect" else None
            runner = FrameRunner(self.network, self.table, size, pixels=kept)
            runner.rehearse(torch.from_numpy(pixels)[None], FEW if self.budget_us is None else CALLS)
            if len(self.runners) >= KEPT:
                self.runners.pop(next(iter(self.runners)))
            self.runners[size] = runner
        self.last = self.runners[size]
        return self.last


def _network(model, checkpoint, attention, options):
    """A network of maps by its name, its weights, or both. Raises `TilewrightError`."""
    if model is None and checkpoint is None:
        raise ConfigError("--model: expected a network, or --checkpoint, found neither")
    if checkpoint in (None, "cached"):
        family, stated = networks.parse(model, options)
        made = networks.create(family, **stated, checkpoint=checkpoint, attention=attention)
        made.labels = ()
        return made
    stated = dict(options) if model is None else networks.parse(model, options)[1]
    return networks.from_checkpoint(checkpoint, attention=attention, **stated)


def _distinct(names):
    """Names of classes, each once."""
    return [name if names.index(name) == at else f"{name} ({at})" for at, name in enumerate(names)]


def _write(folder, stem, image, found, colours, blend):
    """A class map as a PNG with a palette, and its colours over the photograph; each whole or not at all."""
    Image = need("PIL.Image", "images", "study")
    folder.mkdir(parents=True, exist_ok=True)
    map_ = Image.fromarray(found)
    map_.putpalette(colours.tobytes())
    mixed = Image.blend(image, map_.convert("RGB"), blend)
    for picture, path in ((map_, folder / f"{stem}.png"), (mixed, folder / f"{stem}.blend.png")):
        with artifacts.atomic(path) as temporary:
            picture.save(temporary, format="PNG")
