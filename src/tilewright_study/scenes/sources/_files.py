"""What readers of files share: finding pairs of image and label map, reading and resizing them."""

import warnings
from pathlib import Path

import numpy as np

from tilewright.core import registry
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.core.images import opened
from tilewright_study.scenes import sources
from tilewright_study.scenes.pictures import read_rgb

# Endings of images, in lower case.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
# Formats, as Pillow calls them, that keep the values of a label map: a GIF counts the colours that it has anew.
EXACT = ("PNG", "BMP", "PPM", "TIFF")
# Marks values that no label map has.
UNKNOWN = sources.VOID - 1


class Labelled:
    """Images with a label map each, see `tilewright_study.scenes.sources`.

    files: by split, pairs of paths. table: uint8 [256], the label of each value of a map, or `UNKNOWN`. Images are
    resized by a bicubic filter, labels to the nearest. keep: hold what was read, 4 bytes a pixel and size: for sets
    that a training goes through hundreds of times.
    """

    task = "maps"

    def __init__(self, classes, files, table, *, keep=False):
        self.classes, self._files, self._table = tuple(classes), files, table
        self.splits, self._kept = tuple(files), {} if keep else None

    def count(self, split):
        """How many images a split has."""
        registry.check("split", split, self.splits)
        return len(self._files[split])

    def read(self, split, indices, size, device="cpu"):
        """Images and labels, see the contract."""
        import torch

        indices, pixels = sources.checked(self, split, indices), sources.pixels(size)
        found = [self._held(split, index, pixels) for index in indices]
        if not found:
            return torch.empty(0, 3, *pixels, device=device), torch.empty(0, *pixels, dtype=torch.uint8, device=device)
        pictures, labels = (torch.from_numpy(np.stack(x)).to(device) for x in zip(*found, strict=True))
        return sources.normalised(pictures.permute(0, 3, 1, 2)), labels

    def _held(self, split, index, pixels):
        if self._kept is None:
            return self._pair(*self._files[split][index], pixels)
        key = split, index, tuple(pixels)
        if key not in self._kept:
            self._kept[key] = self._pair(*self._files[split][index], pixels)
        return self._kept[key]

    def _pair(self, picture, label, pixels):
        from PIL import Image

        path, picture, label = label, read_rgb(picture), opened(label)
        # A TIFF may hold a JPEG.
        held = f"{label.format} {label.info.get('compression', '')}"
        if label.format not in EXACT or "jpeg" in held or "webp" in held:
            raise ArtifactError(f"{path}: expected a map of labels without loss, such as a PNG, found {held.strip()}")
        if label.mode not in ("L", "P"):
            raise ArtifactError(f"{path}: expected a map of labels in 8 bits, found mode {label.mode}")
        if picture.size != label.size:
            sizes = ["x".join(map(str, image.size)) for image in (picture, label)]
            raise ArtifactError(f"{path}: expected {sizes[0]} labels, as the image has pixels, found {sizes[1]}")
        labels = self._table[np.asarray(label)]
        if (labels == UNKNOWN).any():
            value = int(np.asarray(label)[labels == UNKNOWN].max())
            raise ArtifactError(f"{path}: expected labels of {len(self.classes)} classes, found {value}")
        width_height = pixels[::-1]
        if picture.size != width_height:
            picture = picture.resize(width_height, Image.Resampling.BICUBIC)
            labels = np.asarray(Image.fromarray(labels).resize(width_height, Image.Resampling.NEAREST))
        return np.asarray(picture), labels


def table(labels):
    """uint8 [256] of ``{value: label}``; all others are not known."""
    found = np.full(256, UNKNOWN, np.uint8)
    for value, label in labels.items():
        found[value] = label
    return found


def folder_of(folder, what):
    """`folder` as a path. Raises `ConfigError` where none is stated, `ArtifactError` where there is none."""
    if folder is None:
        raise ConfigError(f"{what}: expected folder=, where its files are, found none")
    if not Path(folder).is_dir():
        raise ArtifactError(f"{folder}: no such folder; expected {what}")
    return Path(folder)


def images(folder, what):
    """Images of a folder and of those in it, sorted; a warning says how many other files there are.

    Hidden files, and those of hidden folders, are none. Raises `ArtifactError` where there are no images.
    """
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and not _hidden(path.relative_to(folder))]
    found = sorted(path for path in paths if path.suffix.lower() in SUFFIXES)
    if not found:
        raise ArtifactError(f"{folder}: expected {what}, found no image ({', '.join(SUFFIXES)})")
    if others := sorted({path.suffix for path in paths if path.suffix.lower() not in SUFFIXES}):
        warnings.warn(
            f"{folder}: {len(paths) - len(found)} of {len(paths)} files are not read as {what}: {', '.join(others)}",
            stacklevel=2,
        )
    return found


def _hidden(path):
    return any(part.startswith(".") for part in path.parts)


def pairs(pictures, labels, named):
    """``[(image, label map)]`` of two folders of one layout. named: the label map's stem of an image's stem.

    Raises `ArtifactError` for a folder without annotations, an image without its own, and two of one name.
    """
    known, found = _named(labels, "annotations"), []
    for place, path in _named(pictures, "images").items():
        wanted = place.with_name(named(place.name))
        if wanted not in known:
            raise ArtifactError(f"{path}: expected its annotation {labels / wanted}, found none")
        found.append((path, known[wanted]))
    return found


def _named(folder, what):
    """``{path in a folder, without its ending: image}``. Raises `ArtifactError` where two endings have one name."""
    found = {}
    for path in images(folder, what):
        place = path.with_suffix("").relative_to(folder)
        if place in found:
            raise ArtifactError(f"{path}: expected one file of this name, found {found[place].name}, too")
        found[place] = path
    return found
