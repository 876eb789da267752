"""CamVid: 701 road frames (Brostow, Fauqueur and Cipolla, 2009), 11 classes.

In the layout of the SegNet tutorial, of 360 x 480 pixels: ``FOLDER/{train,trainannot,val,valannot,test,testannot}``,
11 for pixels without a class. As published, of 720 x 960 pixels, with label maps in 32 colours, of which 11 classes are
made: ``FOLDER/{train,val,test}`` and ``FOLDER/{train,val,test}_labels/*_L.png``, or all frames in
``FOLDER/701_StillsRaw_full`` and ``FOLDER/LabeledApproved_full``, split by their names. Frames are held once they were
read: all of SegNet's take 0.5 GB. Its licence is CC BY-NC: measure with it, and cite it.
"""

import msgspec

from tilewright_study.scenes import labels, sources
from tilewright_study.scenes.sources import _files

CLASSES = (*("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"),)
# Colours of the 32 published classes that each of the 11 has in SegNet's maps, its own first.
COLOURS = {
    "sky": ((128, 128, 128),),
    "building": ((128, 0, 0), (192, 0, 128), (0, 128, 64), (64, 0, 64), (64, 192, 0)),
    "pole": ((192, 192, 128), (0, 0, 64)),
    "road": ((128, 64, 128), (128, 0, 192), (192, 0, 64)),
    "pavement": ((0, 0, 192), (64, 192, 128), (128, 128, 192)),
    "tree": ((128, 128, 0), (192, 192, 0)),
    "sign": ((192, 128, 128), (128, 128, 64), (0, 64, 64)),
    "fence": ((64, 64, 128),),
    "car": ((64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)),
    "pedestrian": ((64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)),
    "bicyclist": ((0, 128, 192), (192, 0, 192)),
}
NOTHING = (0, 0, 0)
SPLITS = {split: split for split in ("train", "val", "test")}
DATA = labels.Data(
    classes=CLASSES,
    palette=tuple(COLOURS[name][0] for name in CLASSES),
    ignore=(len(CLASSES), sources.VOID),
    images="{split}/{name}",
    labels="{split}annot/{name}",
    splits=SPLITS,
)
COLOURED = msgspec.structs.replace(DATA, ignore=(sources.VOID,), labels="{split}_labels/{name}_L")
# Frames of one second in thirty, numbered at 30 a second: those of half a minute stay in one split.
WHOLE = msgspec.structs.replace(
    COLOURED,
    images="701_StillsRaw_full/{name}",
    labels="LabeledApproved_full/{name}_L",
    splits={},
    group=r".*(?=\d{3}$)",
)


def create(folder=None):
    """Frames of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "CamVid, as published or in SegNet's layout")
    whole = (folder / "701_StillsRaw_full").is_dir()
    if not whole and not (folder / "train_labels").is_dir():
        return _files.source(DATA, folder, keep=True)
    read = _files.by_colours(
        {NOTHING: sources.VOID} | {x: label for label, name in enumerate(CLASSES) for x in COLOURS[name]}, len(CLASSES)
    )
    return _files.source(WHOLE if whole else COLOURED, folder, read, keep=True)
