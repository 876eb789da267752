"""Cityscapes: road frames of 1024 x 2048 pixels, 19 classes that are judged (Cordts et al., 2016).

``FOLDER/leftImg8bit/{train,val}/<city>/*_leftImg8bit.png`` and, with the published numbers of labels,
``FOLDER/gtFine/{train,val}/<city>/*_gtFine_labelIds.png``, or ``*_gtFine_labelTrainIds.png`` where these are not there.
"""

import msgspec

from tilewright_study.scenes import labels, sources
from tilewright_study.scenes.sources import _files

# Published numbers of the classes that are judged.
CLASSES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
PALETTE = (
    *((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153), (250, 170, 30)),
    *((220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60), (255, 0, 0), (0, 0, 142)),
    *((0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
)
# Numbers of all labels.
LABELS = 34
DATA = labels.Data(
    classes=tuple(CLASSES),
    palette=PALETTE,
    values=tuple(CLASSES.values()),
    ignore=(*sorted({*range(LABELS)} - {*CLASSES.values()}), sources.VOID),
    images="leftImg8bit/{split}/{name}_leftImg8bit",
    labels="gtFine/{split}/{name}_gtFine_labelIds",
    splits={"train": "train", "val": "val"},
)
TRAIN_IDS = msgspec.structs.replace(
    DATA, values=(), ignore=(sources.VOID,), labels="gtFine/{split}/{name}_gtFine_labelTrainIds"
)


def create(folder=None):
    """Frames of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "Cityscapes (leftImg8bit and gtFine)")
    kinds = (next((folder / "gtFine").glob(f"*/*/*_gtFine_{kind}.png"), None) for kind in ("labelIds", "labelTrainIds"))
    of_labels, of_training = kinds
    return _files.source(DATA if of_labels or not of_training else TRAIN_IDS, folder)
