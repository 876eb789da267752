"""Trained networks with every pruner: what they name right on crops of scenes, and how fast they are (stage T5).

Speed, and the checks that come before it, are those of `_pruned`, with these crops as its images. Images are named
kernel by kernel, in the type and the batch that are timed.
"""

import json
from functools import cache
from pathlib import Path

import torch

from tilewright import devices, networks
from tilewright.core.errors import Unavailable
from tilewright.networks.batching import UNPRUNED
from tilewright_study import scenes
from tilewright_study.experiments.pruned import check_modes
from tilewright_study.experiments.pruned import run as _pruned
from tilewright_study.experiments.pruned_accuracy import FAMILY, PREDICTOR, check_network, sources
from tilewright_study.measure.rows import machine, now
from tilewright_study.training import classification

SOURCE = "crops"
KNOWN, NOVEL = "test", "novel"
# Crops that are drawn at once.
DRAWN = 256


@cache
def crops(split, count, size, place):
    """``(images, labels)`` of the first crops of a split, on `place`: float16 [n, 3, size, size] and int64 [n]."""
    source = scenes.create(SOURCE)
    count = min(count, source.count(split))
    images, labels = torch.empty(count, 3, size, size, dtype=torch.float16, device=place), []
    for lo in range(0, count, DRAWN):
        part, named = source.read(split, range(lo, min(lo + DRAWN, count)), size, place)
        images[lo : lo + len(part)] = part
        labels.append(named)
    return images, torch.cat(labels)


def run(case, settings, how):
    """Yield the rows of a network and a seed; where there are no weights one row, which says so.

    Raises `TilewrightError`.
    """
    check_modes("modes", settings.modes)
    name, _, seed = case.rpartition(".")
    check_network(name)
    try:
        yield from rows(name, int(seed), settings, how, how.effort(settings.max_seconds))
    except Unavailable as reason:
        known = {"network": name, "training": int(seed), "dtype": how.dtype, "time": now()}
        yield known | machine(devices.describe(how.device)) | {"status": "skipped", "reason": str(reason)}


@torch.inference_mode()
def rows(name, seed, settings, how, effort):
    """Yield the rows of a network and a seed; see `pruned_accuracy`. Raises `Unavailable` where weights are missing."""
    if missing := [path for path in sources(settings) if not Path(path).is_file()]:
        raise Unavailable(f"no weights at {missing[0]}")
    _, options = networks.parse(name)
    facts, place = devices.describe(how.device), devices.facts(how.device).TORCH_DEVICE
    classes = len(scenes.create(SOURCE).classes)
    dtype = getattr(torch, how.dtype)
    shown = {split: crops(split, settings.crops, options["image_size"], place) for split in (KNOWN, NOVEL)}
    for pruner, chosen in settings.pruners.items():
        weights = settings.predictor if pruner == PREDICTOR else settings.weights
        for setting in chosen:
            stated = {**options, "num_classes": classes, "pruner": pruner, **setting}
            made = networks.create(FAMILY, **stated, checkpoint=weights, batching=_pruned.ORACLE).to(place, dtype)
            known = {
                **{"network": name, "variant": options["variant"], "resolution": options["image_size"]},
                **{"pruner": pruner, "setting": " ".join(f"{key}={json.dumps(x)}" for key, x in setting.items())},
                **{"dtype": how.dtype, "parameters": sum(x.numel() for x in made.parameters())},
                **{"tokens": made.options.n_tokens, "tolerance": _pruned.TOLERANCE[how.dtype]},
                **{"attention_tolerance": _pruned.ATTENTION_TOLERANCE[how.dtype], **machine(facts)},
                **{"training": seed, "images": classification.images_of(settings.weights)},
                **({"predictor_images": classification.images_of(weights)} if pruner == PREDICTOR else {}),
            }
            for batch in sorted({batch for sizes in settings.modes.values() for batch in sizes}):
                modes = [mode for mode, sizes in settings.modes.items() if batch in sizes]
                named = _named(made, settings.batching, shown, batch, dtype)
                inputs = shown[KNOWN][0][: max(batch, _pruned.judged(how.device))].to(dtype)
                for row in _pruned._batch(made, inputs, batch, settings.batching, modes, effort):
                    yield known | {"batch": batch} | row | named[row["batching"]]


def _named(made, batchings, shown, batch, dtype):
    """``{batching: columns}``: what the network names right with each of `batchings`."""
    found, oracle = {}, None
    for name in (_pruned.ORACLE, *(each for each in batchings if each != _pruned.ORACLE)):
        network = _pruned._unpruned(made) if name == UNPRUNED else made.with_batching(name)
        try:
            columns, first = _answers(network, shown, batch, dtype)
        except Unavailable:
            # Its row says why.
            found[name] = {}
            continue
        oracle = first if oracle is None else oracle
        # Without a pruner another network answers.
        same = {} if name == UNPRUNED else {"changed": int((first != oracle).sum())}
        found[name] = columns | same
    return found


def _answers(network, shown, batch, dtype):
    """``(columns, classes)``: shares that were named right, and the most probable class of each known crop."""
    columns, kept, first = {"crops": len(shown[KNOWN][1])}, [], None
    for split, (images, labels) in shown.items():
        best = []
        for part in images.split(batch):
            logits, layouts = network(part.to(dtype), None, True)
            best.append(logits.topk(min(5, logits.shape[1])).indices)
            if layouts and split == KNOWN:
                kept.append(layouts[-1].choice.keep.sum(1).double())
        best = torch.cat(best)
        right = best == labels[:, None]
        if split == KNOWN:
            first = best[:, 0]
            columns |= {"top1": float(right[:, 0].double().mean()), "top5": float(right.any(1).double().mean())}
        else:
            columns["novel_top1"] = float(right[:, 0].double().mean())
    mean = float(torch.cat(kept).mean()) / network.options.n_tokens if kept else 1.0
    return columns | {"kept": mean}, first
