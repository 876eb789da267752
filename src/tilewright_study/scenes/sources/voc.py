"""PASCAL VOC 2012 for segmentation: 20 classes and the background (Everingham et al., 2010).

``FOLDER/JPEGImages/*.jpg``, ``FOLDER/SegmentationClass/*.png`` and ``FOLDER/ImageSets/Segmentation/{train,val}.txt``.
"""

from tilewright_study.scenes import labels
from tilewright_study.scenes.sources import _files

DATA = labels.Data(
    classes=(
        *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
        *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
    ),
    images="JPEGImages/{name}",
    labels="SegmentationClass/{name}",
    lists="ImageSets/Segmentation/{split}.txt",
    splits={"train": "train", "val": "val"},
)


def create(folder=None):
    """Images of a folder. Raises `ConfigError` and `ArtifactError`."""
    return _files.source(DATA, _files.folder_of(folder, "VOC 2012 (VOCdevkit/VOC2012)"))
