"""Images in folders named by their classes, as ImageNet has them.

``FOLDER/<split>/<class>/*``, or ``FOLDER/<class>/*``, which is then the split ``val``; a folder ``validation`` is
``val``, too. Classes are the folders' names,
sorted: for ImageNet's own that is the order of the published networks' outputs.
"""

import numpy as np

from tilewright.core import registry
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright_study.scenes import sources
from tilewright_study.scenes.pictures import read_rgb
from tilewright_study.scenes.sources import _files

# Splits by the names of their folders.
SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}


class Folder:
    """See `tilewright_study.scenes.sources`. The middle of an image is taken: a share `crop` of its shorter side."""

    task = "classes"

    def __init__(self, classes, files, crop):
        self.classes, self._files, self._crop = tuple(classes), files, crop
        self.splits = tuple(files)

    def count(self, split):
        """How many images a split has."""
        registry.check("split", split, self.splits)
        return len(self._files[split])

    def read(self, split, indices, size, device="cpu"):
        """Images and labels, see the contract."""
        import torch
        from PIL import Image, ImageOps

        indices, (height, width) = sources.checked(self, split, indices), sources.pixels(size)
        pictures = np.empty((len(indices), height, width, 3), np.uint8)
        for picture, index in zip(pictures, indices, strict=True):
            image = read_rgb(self._files[split][index][0])
            # As published networks are judged: somewhat larger than asked for, of which the middle is taken.
            whole = [round(side / self._crop) for side in (width, height)]
            image = _middle(ImageOps.fit(image, whole, Image.Resampling.BICUBIC), width, height)
            picture[:] = np.asarray(image)
        labels = torch.tensor([self._files[split][index][1] for index in indices], dtype=torch.int64, device=device)
        return sources.normalised(torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2)), labels


def create(folder=None, crop=0.875):
    """Images of a folder. Raises `ConfigError` and `ArtifactError`."""
    if not 0 < crop <= 1:
        raise ConfigError(f"crop: expected a share above 0, at most 1, found {crop}")
    folder = _files.folder_of(folder, "a folder for each class")
    named = [name for name in SPLITS if (folder / name).is_dir()]
    places = {SPLITS[name]: folder / name for name in named} or {"val": folder}
    if len(places) < len(named):
        raise ArtifactError(f"{folder}: expected one folder of validation images, found val and validation")
    classes = sorted({path.name for place in places.values() for path in place.iterdir() if _is_class(path)})
    if not classes:
        raise ArtifactError(f"{folder}: expected a folder for each class, found none")
    found = {}
    for split, place in places.items():
        named = [(label, place / name) for label, name in enumerate(classes) if (place / name).is_dir()]
        found[split] = [(path, label) for label, each in named for path in _files.images(each, "images of a class")]
    return Folder(classes, found, crop)


def _is_class(path):
    return path.is_dir() and not path.name.startswith(".")


def _middle(image, width, height):
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
