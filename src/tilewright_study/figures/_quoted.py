"""Figures that README.md and docs/ show of recorded rows, made by one command (stage T6).

A document shows ``figures/<figure>.png`` of two cores, or ``figures/<device>_<figure>.png`` for another device of
`FOLDERS`. A picture says in its ``Source`` of which rows it was drawn.
"""

import hashlib
import re
import tempfile
from functools import cache
from pathlib import Path

from tilewright.core import artifacts
from tilewright_study import figures
from tilewright_study.tables._quoted import FOLDERS

PLACE = "docs/figures"
_LINK = re.compile(r"\]\((?:[\w./-]*/)?figures/(\w+)\.png\)")


def shown(text):
    """Names of the figures of recorded rows that the document `text` shows; pictures of other making are none."""
    return [name for name in dict.fromkeys(_LINK.findall(text)) if _parts(name)[1] in figures.NAMES]


def draw(name, root):
    """Draw the figure `name` of the rows recorded under `root`, a checkout. Raises `ArtifactError`."""
    from tilewright_study.stages import results

    device, figure = _parts(name)
    study = _study(root)
    with tempfile.TemporaryDirectory() as folder:
        made = [_made(path, study, Path(folder)) for path in figures.needs(figure, study)]
        inputs = dict.fromkeys(results.found(path, root / FOLDERS[device], root) for path in made)
        output = root / PLACE / f"{name}.png"
        figures.draw(figure, inputs, [output])
    _say(output, source(name, root))


def source(name, root):
    """What a picture is drawn of: the digest of the recorded rows that it needs."""
    from tilewright_study.stages import results

    device, figure = _parts(name)
    needed = [results.found(path, root / FOLDERS[device], root) for path in figures.needs(figure, _study(root))]
    digest = hashlib.sha256()
    for path in sorted({path for path in needed if path.suffix == ".csv"}):
        digest.update(path.read_bytes())
    return f"{figure} of {FOLDERS[device]} {digest.hexdigest()[:16]}"


def said(path):
    """The source that a picture states; empty where it states none."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.info.get("Source", "")


@cache
def _study(root):
    """The study that selects what is shown: all that runs on a CPU."""
    from tilewright_study.stages import results

    return results.studies(root)[0]


def _parts(name):
    """Device and figure of the name of a picture."""
    device, _, figure = name.partition("_")
    return (device, figure) if device in FOLDERS else ("cpu", name)


def _made(path, study, folder):
    """Where a file that a figure needs is; patterns and blocks, which are not recorded, are made in `folder`."""
    from tilewright_study.stages import blocks, graph, reorder

    if not path.startswith(("results/graphs/", "results/blocks/")):
        return path
    made = folder / path
    model, order = Path(path).parts[2], Path(path).parts[3].removesuffix(".npz")
    pattern = folder / f"results/graphs/{model}.npz"
    ordered = folder / f"results/graphs/{model}/{order}.npz"
    if not pattern.exists():
        graph.run(model, pattern, [])
    if not ordered.exists():
        reorder.run(order, pattern, ordered, [])
    if path.startswith("results/blocks/"):
        blocks.run(ordered, [made.stem], [made], study.region_rows)
    return str(made)


def _say(path, words):
    """Write into a picture what it is drawn of."""
    from PIL import Image, PngImagePlugin

    text = PngImagePlugin.PngInfo()
    text.add_text("Source", words)
    with Image.open(path) as picture, artifacts.atomic(path) as temporary:
        picture.load()
        picture.save(temporary, format="png", optimize=True, pnginfo=text)
