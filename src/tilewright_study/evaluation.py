"""A network on a folder of images: how many it names right, with each of its attentions, and how fast; for one that
labels pixels see `map_evaluation`."""

import csv
import io
import time
from pathlib import Path

from tilewright import devices, networks
from tilewright.core import artifacts, registry
from tilewright.core.errors import ArtifactError, ConfigError, Unavailable
from tilewright_study.cli import settings

# Labels that a top-5 counts.
BEST = 5
DTYPES = ("float32", "float16", "bfloat16")
# Families that label pixels.
MAPS = ("segformer", "swin")
COLUMNS = (
    *("network", "attention", "status", "reason", "weights", "data", "split", "images", "batch", "dtype", "device"),
    *("top1", "top5", "same", "images_per_s"),
)


def run(
    model, data, checkpoint, attention, split, count, batch, classes, device, dtype, output, set, side=None,
    window=None, stride=None, paths=(),
):  # fmt: skip
    """Evaluate the network `model` on the images of a folder; see ``evaluate.py --help``.

    side, window, stride, paths: of a network that labels pixels, see `map_evaluation.rows_of`.

    data: a folder of folders, one for each class. attention: names of the network's attentions, or of a DeiT's
    batchings; none for all. count: of the images at most, evenly spread over the split, None for all. classes: a file
    with the folder's name of each class of the network on a line, or None where folders are all of its classes, in
    their order. output: CSV of a row for each attention, or None. Images that cannot be read are named and left out;
    rows say how many were judged. Raises `TilewrightError`.
    """
    # Here, so that the settings of `cli` come before torch.
    import torch

    from tilewright_study import map_evaluation, scenes

    registry.check("dtype", dtype, DTYPES)
    for name, number in (("batch", batch), ("count", count)):
        if number is not None and number < 1:
            raise ConfigError(f"--{name}: expected at least 1, found {number}")
    facts, place = devices.describe(device), devices.facts(device).TORCH_DEVICE
    family, options = networks.parse(model, settings(set, ("attention", "batching", "checkpoint")))
    what, known = networks.exchanged(family)
    for name in attention:
        registry.check(what, name, known)
    of_maps = {"side": side, "window": window, "stride": stride, "paths": paths}
    if family in MAPS:
        if classes is not None:
            raise ConfigError(f"--classes: expected none, since the data name the classes of {model}, found {classes}")
        how = {"attention": attention, "split": split or "test", "count": count, "batch": batch, **of_maps}
        stated = {"model": model, "data": data, "checkpoint": checkpoint, "device": device, "dtype": dtype}
        rows = []
        for found in map_evaluation.rows_of(family, options, **stated, **how):
            print("\n".join(map_evaluation.shown(found)), flush=True)
            rows += found
        _write(output, map_evaluation.COLUMNS, rows)
        return
    if stray := [name for name, value in of_maps.items() if value]:
        raise ConfigError(f"--{stray[0]}: expected a network that labels pixels, found {model}, which names classes")
    split = split or "val"
    source = scenes.create("folder", folder=data)
    indices = _spread(source.count(split), count)
    rows, first = [], None
    for name in attention or known:
        network = networks.create(family, **options, checkpoint=checkpoint, **{what: name})
        numbers = _numbers(source.classes, classes, network.options.num_classes, data)
        network = network.to(place, getattr(torch, dtype))
        known_row = {
            **{"network": model, "attention": name, "data": Path(data).name, "split": split, "images": len(indices)},
            **{"weights": "random" if network.weights is None else Path(network.weights).name},
            **{"batch": batch, "dtype": dtype, "device": facts["name"]},
        }
        try:
            columns, found, read = _judged(network, source, split, indices, batch, numbers, strict=first is not None)
        except Unavailable as reason:
            print(f"{model}, {name} {what}: skipped: {reason}", flush=True)
            rows.append(known_row | {"status": "skipped", "reason": str(reason)})
            continue
        first, indices = found if first is None else first, read
        row = (
            known_row | columns | {"images": len(read), "status": "ok", "same": float((found == first).double().mean())}
        )
        rows.append(row)
        print(
            f"{model}, {name} {what}: top-1 {row['top1']:.2%}, top-5 {row['top5']:.2%} of {row['images']:,} images; "
            f"{row['images_per_s']:,.1f} images/s in batches of {batch}; {row['same']:.2%} named as by the first",
            flush=True,
        )
    if rows[0]["weights"] == "random":
        print("weights: random, for there is no checkpoint; the shares are those of chance")
    if all(row["status"] != "ok" for row in rows):
        raise Unavailable(f"{model}: expected an attention that runs here, found none: {rows[0]['reason']}")
    _write(output, COLUMNS, rows)


def _write(output, columns, rows):
    """Write rows as CSV, where an output is asked for."""
    if output is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        artifacts.write_text(output, text.getvalue())
        print(f"{output}: written")


def _spread(images, count):
    """Numbers of `count` of so many images, evenly spread: folders come class by class. Raises `ArtifactError`."""
    if not images:
        raise ArtifactError("--data: expected images in the split, found none; the layout is FOLDER/<split>/<class>/*")
    count = images if count is None else min(count, images)
    return [place * images // count for place in range(count)]


def _numbers(names, path, count, data):
    """The network's number of each class of a folder, int64 [classes], as a list.

    path: see `run`. Raises `ArtifactError` where folders and classes do not fit.
    """
    if path is None:
        if len(names) != count:
            raise ArtifactError(
                f"{data}: expected a folder for each of the network's {count} classes, found {len(names)}; name the "
                "folders of all classes by --classes"
            )
        return list(range(count))
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: expected the folder's name of each class on a line, found: {error}") from error
    lines = [line.strip() for line in lines if line.strip()]
    if len(lines) != count:
        raise ArtifactError(f"{path}: expected {count} lines, one for each class of the network, found {len(lines)}")
    if missing := [name for name in names if name not in lines]:
        raise ArtifactError(f"{data}: expected folders that {path} names, found {missing[0]}")
    return [lines.index(name) for name in names]


def _judged(network, source, split, indices, batch, numbers, *, strict):
    """``(columns, classes, indices)``: shares of images that are named right, what each is named, and which were read.

    strict: raise `ArtifactError` for an image that cannot be read, which is left out with a line else.

    images_per_s: of whole batches, from images on the device to classes on the host, without reading. The first batch
    is run twice, for what is done once.
    """
    import torch

    weight = next(network.parameters())
    known, best, truth, read, seconds, timed = torch.tensor(numbers), [], [], [], 0.0, 0
    with torch.inference_mode():
        for lo in range(0, len(indices), batch):
            places = split, network.options.image_size, weight.device
            part, images, labels = _read(source, indices[lo : lo + batch], *places, strict)
            if not part:
                continue
            images = images.to(weight.dtype)
            if not read:
                network(images).cpu()
            begin = time.perf_counter()
            logits = network(images).float().cpu()
            if len(part) == batch or not read:
                seconds, timed = seconds + time.perf_counter() - begin, timed + len(part)
            best.append(logits.topk(min(BEST, logits.shape[1])).indices)
            truth.append(known[labels.cpu()])
            read += part
    if not read:
        raise ArtifactError(f"--data: expected images that can be read, found none of {len(indices)}")
    best, truth = torch.cat(best), torch.cat(truth)
    right = best == truth[:, None]
    columns = {"top1": float(right[:, 0].double().mean()), "top5": float(right.any(1).double().mean())}
    return columns | {"images_per_s": timed / seconds}, best[:, 0], read


def _read(source, indices, split, size, device, strict):
    """``(indices, images, labels)`` of the images that can be read; a line for each other, unless `strict`."""
    import torch

    try:
        return indices, *source.read(split, indices, size, device)
    except ArtifactError:
        if strict:
            raise
    found = []
    for index in indices:
        try:
            found.append((index, *source.read(split, [index], size, device)))
        except ArtifactError as error:
            print(f"left out: {error}", flush=True)
    if not found:
        return [], None, None
    read, images, labels = zip(*found, strict=True)
    return list(read), torch.cat(images), torch.cat(labels)
