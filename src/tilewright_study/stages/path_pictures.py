"""What the figure of scenes draws: pictures, their labels, and the labels that paths of a trained network give them."""

import numpy as np

from tilewright import devices
from tilewright.core import artifacts
from tilewright_study import experiments
from tilewright_study.cli import settings

KIND, VERSION = "path pictures", 1
# Pictures that are shown, from these on: of the split `test`. Paths, from the best to the fastest.
SCENES, PATHS = 3, 4
# Share of the best mean IoU that a path needs to be shown.
LEAST = 0.5


def run(case, table, output, device, stated):
    """Write the pictures of a `case` of the experiment ``paths`` to `output`, an ``.npz``; stated: its settings.

    table: its rows. ``pictures`` uint8 [scenes, H, W, 3], ``labels`` uint8 [scenes, H, W] with 255 where there is none,
    ``seen`` uint8 [scenes, paths, H, W]. The header names the paths, their microseconds and their mean IoU, and the
    classes. Raises `TilewrightError`.
    """
    import torch
    import torch.nn.functional as F

    from tilewright import networks
    from tilewright.paths import table as tables
    from tilewright_study import scenes
    from tilewright_study.scenes import sources

    chosen = experiments.parse("paths", settings(stated))
    place = devices.facts(device).TORCH_DEVICE
    rows = front([entry for entry in tables.read(table) if entry.rung == chosen.rungs[0]])
    kept = [rows[at] for at in np.linspace(len(rows) - 1, 0, min(PATHS, len(rows))).round().astype(int)]
    source = scenes.stated(chosen.data)
    family, options = networks.parse(chosen.network.network)
    network = networks.create(family, checkpoint=chosen.network.file, num_classes=len(source.classes), **options)
    network = network.to(place).eval()
    images, labels = source.read("test", range(SCENES), network.options.pixels, place)
    with torch.inference_mode():
        seen = [
            F.interpolate(network(images, entry.path), size=images.shape[2:], mode="bilinear").argmax(1)
            for entry in kept
        ]
    mean, deviation = (torch.tensor(x, device=place).view(3, 1, 1) for x in (sources.MEAN, sources.DEVIATION))
    pictures = ((images * deviation + mean) * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
    arrays = {"pictures": pictures, "labels": labels, "seen": torch.stack(seen, 1).byte()}
    header = {
        "device": devices.describe(device)["name"],
        "network": case,
        "classes": list(source.classes),
        "paths": [entry.path for entry in kept],
        "p50_us": [entry.p50_us for entry in kept],
        "miou": [entry.test for entry in kept],
    }
    artifacts.write_npz(
        output, KIND, VERSION, {name: x.cpu().numpy() for name, x in arrays.items()}, header, compress=True
    )


def front(entries):
    """Those of `entries`, judged on scenes of ``test``, that none is faster and better than, the fastest first.

    By medians, not by promises, which on a busy machine are those of the slowest call.
    """
    kept, best = [], LEAST * max((entry.test or 0.0 for entry in entries), default=0.0)
    for entry in sorted(entries, key=lambda entry: entry.p50_us):
        if entry.test is not None and entry.test > best:
            kept.append(entry)
            best = entry.test
    return kept


def read(path):
    """``(arrays, header)`` of pictures. Raises `ArtifactError`."""
    return artifacts.read_npz(path, KIND, VERSION)


def needs(config):
    """The files of pictures that a study makes, one for each network."""
    cases = experiments.cases("paths", config) if "paths" in config.experiments and not config.recorded else []
    return [f"{experiments.LOGS}paths/{case}.npz" for case in cases]
