"""A network of maps on images with label maps of their own sizes: mean IoU by class, whole or in sliding windows."""

import itertools
import time
from pathlib import Path

from tilewright import devices, networks
from tilewright.core.errors import ConfigError

# The longer side of an image, in shorter ones of the network: as published for ADE20K, 2,048 of 512 pixels.
MOST_RATIO = 4
ORIGINAL = "original"
COLUMNS = (
    *("network", "attention", "path", "weights", "data", "split", "images", "side", "window", "stride", "dtype"),
    *("device", "class", "pixels", "iou", "miou", "accuracy", "images_per_s"),
)


def rows_of(
    family, options, *, model, data, checkpoint, attention, split, count, batch, device, dtype, side, window, stride,
    paths,
):  # fmt: skip
    """Yield lists of rows, one for each class, of each attention and path; see ``evaluate.py --help``.

    Images are resized until their shorter side has `side` pixels, None for the network's own or `ORIGINAL`, with the
    ratio of their sides. They are seen whole, or in windows of a side or of height and width, `stride` pixels apart,
    whose logits are averaged. Logits are interpolated to the size of the label map. batch: windows that are seen at
    once. Raises `TilewrightError`.
    """
    import torch

    from tilewright_study import scenes
    from tilewright_study.scenes import sources

    source, window = sources.stated(data), window and sources.pixels(window[0] if len(window) == 1 else window)
    if not hasattr(source, "whole"):
        raise ConfigError(f"--data: expected a folder of images and label maps, found {data}; known: {scenes.NAMES}")
    place, facts = devices.facts(device).TORCH_DEVICE, devices.describe(device)
    _, known = networks.exchanged(family)
    total = source.count(split)
    if not total:
        raise ConfigError(f"--split: expected images in {split}, found none")
    indices = [at * total // min(count or total, total) for at in range(min(count or total, total))]
    for name in attention or (None,):
        if checkpoint in (None, "cached"):
            named = {"num_classes": len(source.classes), **options}
            made = networks.create(family, **named, checkpoint=checkpoint, attention=name)
        else:
            made = networks.from_checkpoint(checkpoint, attention=name, **options)
        made = made.to(place, getattr(torch, dtype))
        _check(made, source, window, stride)
        shown = min(made.options.pixels) if side is None else side
        for path in [made.path(text) for text in paths] or [made.path()]:
            begin = time.perf_counter()
            how = {"side": None if shown == ORIGINAL else shown, "window": window, "stride": stride, "batch": batch}
            found = confusion(made, source, split, indices, path=path, **how)
            pace = len(indices) / (time.perf_counter() - begin)
            stated = {
                "network": model, "attention": name or known[0], "path": str(path), "data": Path(data).name,
                "weights": "random" if made.weights is None else Path(made.weights).name, "split": split,
                "images": len(indices), "side": shown, "window": window and "x".join(map(str, window)),
                "stride": stride, "dtype": dtype, "device": facts["name"], "images_per_s": pace,
            }  # fmt: skip
            yield [stated | row for row in _by_class(source.classes, found)]


def _check(network, source, window, stride):
    """Raise `ConfigError` for other classes than the source's, and for windows that leave pixels out."""
    classes, least = network.options.num_classes, network.options.least
    if len(source.classes) != classes:
        raise ConfigError(f"--data: expected {classes} classes of the network, found {len(source.classes)}")
    if window is None and stride is not None:
        raise ConfigError("--stride: expected --window, too, found none")
    if window is not None and min(window) < least:
        raise ConfigError(f"--window: expected at least {least} pixels a side, found {min(window)}")
    if window is not None and stride is not None and stride > min(window):
        raise ConfigError(f"--stride: expected at most the {min(window)} pixels of a window, found {stride}")


def confusion(network, source, split, indices, *, path=None, side=None, window=None, stride=None, batch=1):
    """int64 [classes, classes]: pixels of each label (rows) that a network gives each label (columns), as NumPy.

    Of whole images at the size of their label maps, see `rows_of`. window: pixels (height, width), or None.
    """
    import torch

    from tilewright_study.training import evaluation

    weight, classes = next(network.parameters()), network.options.num_classes
    total = torch.zeros(classes, classes, dtype=torch.int64, device=weight.device)
    with torch.inference_mode():
        for index in indices:
            picture, labels = source.whole(split, index)
            image = image_of(network, picture, side)
            if window is None:
                maps = network(image, path).float()
            else:
                maps = windowed(lambda views: network(views, path), image, window, stride or min(window), batch)
            total += evaluation.counted(maps, torch.from_numpy(labels)[None].to(weight.device), classes)
    return total.cpu().numpy()


def sized(size, side, least, most=MOST_RATIO):
    """Height and width of an image of this size: with a shorter side of `side` pixels, None for its own, a longer one
    of at most `most` times as many, and none below `least`."""
    scale = 1.0 if side is None else min(side / min(size), most * side / max(size))
    return tuple(max(least, round(scale * each)) for each in size)


def image_of(network, picture, side, most=MOST_RATIO):
    """An image [1, 3, h, w] for a network of a picture uint8 [H, W, 3]: of a size as in `sized`."""
    import torch

    from tilewright.paths import frames

    weight = next(network.parameters())
    size = sized(picture.shape[:2], side, network.options.least, most)
    image = torch.empty(1, 3, *size, dtype=weight.dtype, device=weight.device)
    return frames.images_of(torch.from_numpy(picture)[None].to(weight.device), image)


def windows(size, window, stride):
    """``[(top, left)]`` of windows over an image: one every `stride` pixels, the last ones such that they end with it.

    A window that is larger than the image has its sides.
    """
    begins = [
        [min(at, max(side - part, 0)) for at in range(0, max(side - part, 0) + stride, stride)]
        for side, part in zip(size, window, strict=True)
    ]
    return list(itertools.product(*map(dict.fromkeys, begins)))


def windowed(call, image, window, stride, batch):
    """float32 [1, classes, H, W]: logits of an image [1, 3, H, W], averaged over the windows that see a pixel.

    call: ``call(views)`` gives maps [n, classes, h, w] of at most `batch` views. window, stride: see `windows`.
    """
    import torch
    import torch.nn.functional as F

    size = image.shape[2:]
    inner = [min(pixels) for pixels in zip(window, size, strict=True)]
    places, total, seen = windows(size, inner, stride), None, image.new_zeros(size, dtype=torch.float32)
    for lo in range(0, len(places), batch):
        part = places[lo : lo + batch]
        views = torch.cat([image[:, :, top : top + inner[0], left : left + inner[1]] for top, left in part])
        maps = F.interpolate(call(views).float(), size=inner, mode="bilinear", align_corners=False)
        if total is None:
            total = maps.new_zeros(1, maps.shape[1], *size)
        for (top, left), logits in zip(part, maps, strict=True):
            place = slice(top, top + inner[0]), slice(left, left + inner[1])
            total[0, :, place[0], place[1]] += logits
            seen[place] += 1
    return total / seen


def _by_class(names, confusion):
    """Columns of each class, with what is of all of them."""
    from tilewright_study.training import evaluation

    shared = {"miou": evaluation.mean_iou(confusion), "accuracy": float(confusion.trace() / max(1, confusion.sum()))}
    pixels, ious = confusion.sum(1).tolist(), evaluation.ious(confusion).tolist()
    return [
        {"class": name, "pixels": count, "iou": "" if iou != iou else iou, **shared}
        for name, count, iou in zip(names, pixels, ious, strict=True)
    ]


def shown(rows):
    """Lines that say what the rows of one attention and path hold."""
    first = rows[0]
    how = f"windows of {first['window']}, {first['stride']} apart" if first["window"] else "whole images"
    yield (
        f"{first['network']}, {first['attention']} attention, {first['path']}: mean IoU {first['miou']:.2%}, "
        f"{first['accuracy']:.2%} of pixels, {first['images']:,} images of {first['split']}, {how}, "
        f"{first['images_per_s']:,.1f} images/s"
    )
    for row in rows:
        if row["pixels"]:
            yield f"  {row['iou']:7.2%}  {row['class']}"
