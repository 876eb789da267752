"""Cityscapes: road frames of 1024 x 2048 pixels, 19 classes that are judged (Cordts et al., 2016).

``FOLDER/leftImg8bit/{train,val}/<city>/*_leftImg8bit.png`` and, with the published numbers of labels,
``FOLDER/gtFine/{train,val}/<city>/*_gtFine_labelIds.png``.
"""

from tilewright_study.scenes import sources
from tilewright_study.scenes.sources import _files

# Published numbers of the classes that are judged.
CLASSES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
# Numbers of all labels.
LABELS = 34


def create(folder=None):
    """Frames of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "Cityscapes (leftImg8bit and gtFine)")
    found = {}
    for split in ("train", "val"):
        pairs = _files.pairs(folder / "leftImg8bit" / split, folder / "gtFine" / split, _annotation)
        found[split] = pairs
    labels = {**dict.fromkeys(range(LABELS), sources.VOID), sources.VOID: sources.VOID}
    labels |= {value: label for label, value in enumerate(CLASSES.values())}
    return _files.Labelled(CLASSES, found, _files.table(labels))


def _annotation(stem):
    return stem.removesuffix("_leftImg8bit") + "_gtFine_labelIds"
