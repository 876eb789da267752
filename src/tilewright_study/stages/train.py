"""Training of a SegFormer on scenes, or on images with labels in a folder of the user's."""

from time import perf_counter

import msgspec

from tilewright import devices
from tilewright.core import artifacts
from tilewright.core.errors import ConfigError


def run(
    *, network, output, data, recipe, minutes, steps, size, batch, start, log, scores, judged, device, seed, limit_s,
    compiled, paths=(),
):  # fmt: skip
    """Train the network of a name; see ``train.py --help``.

    output: weights to write. data: a source, as `scenes.stated` takes it. recipe: a name of `segmentation.RECIPES`, a
    JSON file, or JSON. minutes, steps, seed: instead of the recipe's, or None. size, batch: one stage of images of this
    side, so many a step, instead of the recipe's stages, or None. start: weights to go on from, or None. log: CSV of
    the steps, scores: JSON of how well the network does, each or None. judged: images of a split that it is judged by.
    paths: texts of execution paths that it is judged by besides, with the network's statistics.
    limit_s, compiled: as `segmentation.train` takes them. Raises `TilewrightError`.
    """
    # Here, so that the settings of `cli` come before torch.
    from tilewright import networks
    from tilewright_study import scenes
    from tilewright_study.training import segmentation

    chosen = segmentation.read_recipe(recipe)
    if minutes is not None or steps is not None:
        chosen = _changed(chosen, minutes=minutes, steps=steps)
    if batch is not None and size is None:
        raise ConfigError("batch: expected a size, too, found none")
    if size is not None:
        stage = {"until": 1.0, "sizes": [size], **({} if batch is None else {"batch": batch})}
        chosen = _changed(chosen, stages=[stage])
    if seed is not None:
        chosen = _changed(chosen, seed=seed)
    devices.describe(device)
    place = devices.facts(device).TORCH_DEVICE
    source = scenes.stated(data)
    family, options = networks.parse(network)
    made = networks.create(family, seed=chosen.seed, num_classes=len(source.classes), **options)
    if start is not None:
        segmentation.start(made, start)
    made = made.to(place)

    def show(line):
        print(f"{network}: {line}", flush=True)

    asked = [made.path(text) for text in paths]
    trained = segmentation.train(made, source, chosen, output, limit_s=limit_s, compiled=compiled, show=show)
    if log is not None:
        segmentation.write_log(log, trained)
    done, pace = len(trained.log["loss"]), trained.images / max(trained.seconds, 1e-9)
    so_far = "" if trained.done else ", before the end; the same command goes on"
    show(f"{output}: written after {done} steps, {trained.images} images, {trained.seconds:.0f} s{so_far}")
    found = {"network": network, "data": data, "steps": done, "images": trained.images, "seconds": trained.seconds}
    found |= {"left_out": trained.left_out, "images_per_s": pace} | _judged(made, source, judged, show)
    if asked:
        found["paths"] = {str(path): _judged(made, source, judged, show, path) for path in asked}
    if scores is not None:
        artifacts.write_json(scores, "training scores", 1, found, {"recipe": msgspec.to_builtins(chosen)})


def _changed(recipe, **stated):
    """`recipe` with other values, checked as those of a file are. Raises `ConfigError`."""
    try:
        return msgspec.convert(msgspec.to_builtins(recipe) | stated, type(recipe))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{', '.join(stated)}: {error}") from None


def _judged(network, source, count, show, path=None):
    """Mean IoU on splits that are not trained with, by name; of a path, or of the whole network."""
    from tilewright_study.training import evaluation

    found = {}
    for split in source.splits:
        if split in ("train", "fit", "choice") or not count:
            continue
        begin, indices = perf_counter(), range(min(count, source.count(split)))
        confusion = evaluation.confusion(network, source, split, indices, path=path)
        found[f"miou_{split}"] = evaluation.mean_iou(confusion)
        ious = [None if value != value else value for value in evaluation.ious(confusion).tolist()]
        found[f"ious_{split}"] = dict(zip(source.classes, ious, strict=True))
        seconds = perf_counter() - begin
        named = split if path is None else f"{split}, {path}"
        show(f"{named}: mIoU {found[f'miou_{split}']:.4f} on {len(indices)} images, {seconds:.1f} s")
    return found
