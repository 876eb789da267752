"""Training of a network that names the main object of a crop, and of DynamicViT's predictor for it."""

import csv
import io

import msgspec

from tilewright import devices
from tilewright.core import artifacts
from tilewright.core.errors import ConfigError

# The first image of a seed: no training comes to those of the next.
SEED_STRIDE = 1 << 26
SOURCE = "crops"


def run(
    network, output, losses, predictor, device, seed, seconds, steps, predictor_seconds, predictor_steps, keep_ratio,
    batch, compiled,
):  # fmt: skip
    """Train the network of a name; see ``train_classifier.py --help``.

    output, predictor: weights to write, the second with a trained predictor, or None. losses: CSV of the loss of each
    step, or None. batch: images of a step, or None for the recipes'. Raises `TilewrightError`.
    """
    # Here, so that the settings of `cli` come before torch.
    from tilewright import networks
    from tilewright_study import scenes
    from tilewright_study.training import classification

    devices.describe(device)
    place, source = devices.facts(device).TORCH_DEVICE, scenes.create(SOURCE)
    family, options = networks.parse(network, {"num_classes": len(scenes.create(SOURCE).classes)})
    if family != "deit":
        raise ConfigError(f"network: expected one of the family deit, found {network}")
    recipes = [classification.Recipe(), classification.PredictorRecipe()]
    if batch is not None:
        recipes = [msgspec.structs.replace(recipe, batch=batch) for recipe in recipes]

    def show(line):
        print(f"{network}: {line}", flush=True)

    made = networks.create(family, **options, seed=seed).to(place)
    how = {"first": seed * SEED_STRIDE, "show": show}
    trained = classification.train(
        made, source, recipes[0], output, steps=steps, seconds=seconds, compiled=compiled, **how
    )
    show(f"{output}: written, {trained.images:,} images in {trained.seconds:.0f} s, {_last(trained)}")
    runs = [("network", trained)]
    if predictor is not None:
        stated = {**options, "pruner": "dynamicvit", "predictor": "random", "keep_ratio": keep_ratio}
        pruned = networks.create(family, **stated, seed=seed).to(place)
        pruned.load_state_dict(made.state_dict(), strict=False)
        # Behind the images that the network saw.
        how["first"] += trained.images
        taught = classification.train_predictor(
            pruned, source, recipes[1], predictor, steps=predictor_steps, seconds=predictor_seconds, **how
        )
        shares = ", ".join(f"{share:.0%}" for share in taught.kept)
        show(
            f"{predictor}: written, {taught.images:,} images in {taught.seconds:.0f} s, keeps {shares}, {_last(taught)}"
        )
        runs.append(("predictor", taught))
    if losses is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("part", "step", "loss"))
        writer.writerows((part, step, loss) for part, found in runs for step, loss in enumerate(found.losses, 1))
        artifacts.write_text(losses, text.getvalue())


def _last(trained):
    last = trained.losses[-50:]
    return f"loss {sum(last) / len(last):.3f} in the last steps" if last else "not a step"
