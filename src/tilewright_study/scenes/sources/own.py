"""A folder of one's own: images and label maps where its ``data.toml`` or ``data.json`` says (`labels.Data`).

``FOLDER/images/*`` and ``FOLDER/labels/*`` with the numbers of classes, where it says no more than their names. Images
keep the ratio of their sides. Splits follow from the names of files and the seed, from folders or from lists.
"""

from tilewright_study.scenes import labels
from tilewright_study.scenes.sources import _files


def create(folder=None):
    """Images of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "images, label maps and data.toml")
    return _files.source(labels.read(folder), folder, own=True)
