"""CamVid in the layout of the SegNet tutorial: road frames of 360 x 480 pixels (Brostow, Fauqueur and Cipolla, 2009).

``FOLDER/{train,trainannot,val,valannot,test,testannot}/*.png``, 11 classes, 11 for pixels without one; frames
may also be WebP. Frames are held once they were read: all 701 take 0.5 GB. Its licence is
CC BY-NC: measure with it, and cite it.
"""

from tilewright_study.scenes import sources
from tilewright_study.scenes.sources import _files

CLASSES = (*("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"),)


def create(folder=None):
    """Frames of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "CamVid in SegNet's layout")
    splits = ("train", "val", "test")
    found = {split: _files.pairs(folder / split, folder / f"{split}annot", lambda stem: stem) for split in splits}
    labels = {**{label: label for label in range(len(CLASSES))}, len(CLASSES): sources.VOID, sources.VOID: sources.VOID}
    return _files.Labelled(CLASSES, found, _files.table(labels), keep=True)
