"""What readers of files share: finding pairs of image and label map, splitting them, reading and resizing them."""

import hashlib
import os
import re
import warnings
from itertools import groupby
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
# Modes of Pillow that hold a value a pixel, and those that hold a colour.
VALUES, COLOURS = ("L", "P", "1", "I", "I;16"), ("RGB", "RGBA", "P", "L")
# Bytes of images and labels that a source holds, where it holds any.
KEPT_BYTES = 1 << 30
# What a folder calls a split.
NAMED = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "fit": "fit",
    "choice": "choice", "test": "test", "testing": "test",
}  # fmt: skip
# Splits that are made of others, and bytes of a file that are compared first.
MADE, HEAD = ("train", "fit", "choice", "test"), 1 << 16


class Labelled:
    """Images with a label map each, see `tilewright_study.scenes.sources`.

    labels: the `Labels`. files: by split, pairs of an image's path and of what `read` takes. read: ``read(label,
    (width, height))`` gives labels uint8 [height, width]. Images are resized by a bicubic filter, labels to the
    nearest. keep: hold what was read, up to `KEPT_BYTES`: for sets that a training goes through hundreds of times. fit:
    keep the ratio of an image's sides, with the mean colour and no labels beside it.
    """

    task = "maps"

    def __init__(self, labels, files, read, *, keep=False, fit=False):
        self.labels, self.classes, self._files, self._read = labels, tuple(labels.classes), files, read
        self.splits, self._room, self._kept, self._fit = tuple(files), KEPT_BYTES * keep, {}, fit

    def count(self, split):
        """How many images a split has."""
        registry.check("split", split, self.splits)
        return len(self._files[split])

    def whole(self, split, index):
        """An image and its labels as they are: uint8 [H, W, 3] and uint8 [H, W]. Raises as `read` does."""
        (index,) = sources.checked(self, split, [index])
        picture, labels = self._opened(*self._files[split][index])
        return np.array(picture), labels

    def name(self, split, index):
        """The path of an image."""
        return self._files[split][index][0]

    def read(self, split, indices, size, device="cpu"):
        """Images and labels, see the contract."""
        import torch

        indices, pixels = sources.checked(self, split, indices), sources.pixels(size)
        found = [self._held(split, index, tuple(pixels)) for index in indices]
        if not found:
            return torch.empty(0, 3, *pixels, device=device), torch.empty(0, *pixels, dtype=torch.uint8, device=device)
        pictures, labels = (torch.from_numpy(np.stack(x)).to(device) for x in zip(*found, strict=True))
        return sources.normalised(pictures.permute(0, 3, 1, 2)), labels

    def _held(self, split, index, pixels):
        files = self._files[split][index]
        key = files[0], pixels
        if key in self._kept:
            return self._kept[key]
        picture, labels = self._opened(*files)
        found = (_fitted if self._fit else _stretched)(picture, labels, pixels[::-1])
        if (size := 4 * pixels[0] * pixels[1]) <= self._room:
            self._room -= size
            self._kept[key] = found
        return found

    def _opened(self, picture, label):
        picture = read_rgb(picture)
        return picture, self._read(label, picture.size)


def _stretched(picture, labels, size):
    """Arrays of a picture and its labels of ``(width, height)``."""
    from PIL import Image

    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
        labels = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
    return np.asarray(picture), labels


def _fitted(picture, labels, size):
    """As `_stretched`, with the picture's ratio of sides, in the middle."""
    share = min(whole / side for whole, side in zip(size, picture.size, strict=True))
    inner = tuple(min(whole, max(1, round(share * side))) for whole, side in zip(size, picture.size, strict=True))
    left, top = ((whole - side) // 2 for whole, side in zip(size, inner, strict=True))
    picture, labels = _stretched(picture, labels, inner)
    place = slice(top, top + inner[1]), slice(left, left + inner[0])
    pictures = np.empty((size[1], size[0], 3), np.uint8)
    pictures[:] = np.round(255 * np.array(sources.MEAN)).astype(np.uint8)
    wide = np.full(size[::-1], sources.VOID, np.uint8)
    pictures[place], wide[place] = picture, labels
    return pictures, wide


# Label maps


def by_values(labels, classes):
    """A reader of maps that hold values. labels: ``{value: label}``; all others are not known."""
    table, known = np.zeros(256, np.uint8), np.zeros(256, bool)
    for value, label in labels.items():
        table[value], known[value] = label, True

    def read(path, size):
        values = _values(path, size)
        if not known[values].all():
            value = values[~known[values]].max()
            _refuse(path, values == value, f"labels of {classes} classes", value)
        return table[values]

    return read


def by_colours(labels, classes):
    """A reader of maps that hold colours. labels: ``{(red, green, blue): label}``."""
    found = sorted((_packed(np.array(colour)), label) for colour, label in labels.items())
    colours, given = (np.array(x) for x in zip(*found, strict=True))

    def read(path, size):
        pixels = np.asarray(_exact(path, size, COLOURS, "colours").convert("RGB"))
        packed = _packed(pixels)
        at = np.searchsorted(colours, packed).clip(max=len(colours) - 1)
        if (other := colours[at] != packed).any():
            first = packed[other][0]
            colour = tuple(int(first >> shift & 255) for shift in (16, 8, 0))
            _refuse(path, packed == first, f"colours of {classes} classes", colour)
        return given[at].astype(np.uint8)

    return read


def by_files(background):
    """A reader of a file for each class. background: the label of pixels that are in none of them."""

    def read(paths, size):
        found = np.full(size[::-1], background, np.uint8)
        for label, path in sorted(paths.items()):
            found[_values(path, size) > 0] = label
        return found

    return read


def _packed(colours):
    red, green, blue = np.moveaxis(colours.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


def _values(path, size):
    """uint8 [height, width] of a map."""
    values = np.asarray(_exact(path, size, VALUES, "labels in 8 bits"))
    if values.dtype.itemsize > 1 and not 0 <= (most := max(int(values.max()), -int(values.min()))) <= 255:
        raise ArtifactError(f"{path}: expected a map of labels in 8 bits, found the value {most}")
    return values.astype(np.uint8)


def _exact(path, size, modes, what):
    """The image of a label map. Raises `ArtifactError`."""
    label = opened(path)
    # A TIFF may hold a JPEG.
    held = f"{label.format} {label.info.get('compression', '')}"
    if label.format not in EXACT or "jpeg" in held or "webp" in held:
        raise ArtifactError(f"{path}: expected a map of labels without loss, such as a PNG, found {held.strip()}")
    if label.mode not in modes:
        hint = '; state pixels = "colours" and a palette for maps of colours' if label.mode in COLOURS else ""
        raise ArtifactError(f"{path}: expected a map of {what}, found mode {label.mode}{hint}")
    if label.size != size:
        sizes = ["x".join(map(str, sides)) for sides in (size, label.size)]
        raise ArtifactError(f"{path}: expected {sizes[0]} labels, as the image has pixels, found {sizes[1]}")
    return label


def _refuse(path, where, expected, found):
    row, column = np.argwhere(where)[0]
    raise ArtifactError(
        f"{path}: expected {expected}, found {found} in {where.sum()} pixels, the first in row {row}, column {column}"
    )


# Files


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
    found = [Path(folder, name) for name in _visible(folder) if name.lower().endswith(SUFFIXES)]
    if not found:
        raise ArtifactError(f"{folder}: expected {what}, found no image ({', '.join(SUFFIXES)})")
    _warn_of_others(folder, what)
    return found


def _warn_of_others(folder, what):
    names = _visible(folder)
    others = [Path(name).suffix for name in names if not name.lower().endswith(SUFFIXES)]
    if others:
        warnings.warn(
            f"{folder}: {len(others)} of {len(names)} files are not read as {what}: {', '.join(sorted({*others}))}",
            stacklevel=3,
        )


def _visible(folder):
    """Files of a folder and of those in it, as texts ``folder/file``, sorted. Links to folders are followed, once."""
    found, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(place, folder).split(os.sep) if place != str(folder) else []
        found += [[*below, name] for name in names if not name.startswith(".")]
    return ["/".join(parts) for parts in sorted(found)]


def source(data, folder, read=None, *, own=False, keep=False):
    """The source of a folder as a `Data` says.

    read: of label maps, where they are not as it says. own: whether it is a folder of the user's: copies of a file stay
    together, and images keep the ratio of their sides. keep: see `Labelled`. Raises `ArtifactError`.
    """
    found = _listed(data, folder) if data.lists else _paired(data, folder)
    if whole := found.pop("", None):
        found = _parted(folder, data, whole, MADE, copies=own)
    return Labelled(data, _completed(folder, data, found), read or _reader(data), keep=keep or own, fit=own)


def _reader(data):
    if data.by_class:
        return by_files(data.classes.index(data.background) if data.background else sources.VOID)
    if data.pixels == "colours":
        ignored = dict.fromkeys(data.ignore_colours, sources.VOID)
        return by_colours(ignored | {c: label for label, c in enumerate(data.palette)}, len(data.classes))
    ignored = dict.fromkeys(data.ignore, sources.VOID)
    return by_values(ignored | {value: label for label, value in enumerate(data.known)}, len(data.classes))


def _paired(data, folder):
    """``{split: [(image, label map)]}``; the split is an empty text where templates have none.

    Raises `ArtifactError` for a folder without images or annotations, an image without its own, and two of one name.
    """
    texts = {text: split for split, text in data.splits.items()} or NAMED
    pictures, labels = _found(data, folder, texts)
    if lone := sorted({*labels} - {*pictures}):
        warnings.warn(f"{folder}: {len(lone)} label maps have no image, such as that of {lone[0][1]}", stacklevel=2)
    found = {}
    for (split, name), path in sorted(pictures.items(), key=lambda each: each[1]):
        if (split, name) not in labels:
            wanted = data.labels.replace("{split}", {split: text for text, split in texts.items()}.get(split, ""))
            raise ArtifactError(
                f"{path}: expected its annotation {folder / wanted.replace('{name}', name)}, found none"
            )
        found.setdefault(split, []).append((path, labels[split, name]))
    if missing := [text for split, text in data.splits.items() if split not in found]:
        raise ArtifactError(f"{folder}: expected images {data.images.replace('{split}', missing[0])}, found no image")
    return {split: found[split] for split in dict.fromkeys(("", *NAMED.values())) if split in found}


def _found(data, folder, texts):
    """``{(split, name): image}``, and the same of label maps. Raises `ArtifactError` where there are none."""
    labels = _matched(folder, data.labels, texts, data.classes)
    taken = {path for place in labels.values() for path in (place.values() if data.by_class else [place])}
    pictures = _matched(folder, data.images, texts, ignored=taken)
    for what, template, found in (("images", data.images, pictures), ("annotations", data.labels, labels)):
        if not found:
            raise ArtifactError(f"{folder}: expected {what} {template}, found no image there ({', '.join(SUFFIXES)})")
    taken |= {*pictures.values()}
    if data.by_class:
        base = _base(folder, data.labels)
        left = (base / name for name in _visible(base) if name.lower().endswith(SUFFIXES))
        if other := next((path for path in left if path not in taken), None):
            raise ArtifactError(
                f"{other}: expected a label map {data.labels} of a class, found another name; known: "
                f"{', '.join(data.classes)}"
            )
    if (base := _base(folder, data.images)) != folder:
        _warn_of_others(base, "images")
    return pictures, labels


def _base(folder, template):
    """The folder in which all files of a template are."""
    return folder / template.partition("{")[0].rpartition("/")[0]


def _matched(folder, template, texts, classes=(), ignored=()):
    """``{(split, name): path}`` of a template's files, or of these ``{label: path}`` where it has ``{class}``."""
    parts = re.split(r"(\{\w+\})", template)
    held = {
        "{name}": "(?P<name>.+?)",
        "{split}": f"(?P<split>{'|'.join(map(re.escape, texts))})",
        "{class}": f"(?P<label>{'|'.join(map(re.escape, classes))})",
    }
    ending = "" if parts[-1].lower().endswith(SUFFIXES) else f"(?i:{'|'.join(map(re.escape, SUFFIXES))})"
    pattern = re.compile("".join(held.get(part) or re.escape(part) for part in parts) + ending)
    found = {}
    base = template.partition("{")[0].rpartition("/")[0]
    for name in _visible(folder / base):
        path = folder / base / name
        if path in ignored or not (match := pattern.fullmatch(f"{base}/{name}" if base else name)):
            continue
        groups = match.groupdict()
        place, kept = (texts[groups["split"]] if "split" in groups else "", groups["name"]), found
        if "label" in groups:
            kept, place = found.setdefault(place, {}), classes.index(groups["label"])
        if place in kept:
            raise ArtifactError(f"{path}: expected one file of this name, found {kept[place].name}, too")
        kept[place] = path
    return found


def _listed(data, folder):
    """``{split: [(image, label map)]}`` of lists of names. Raises `ArtifactError`, also for a name in two of them."""
    found, seen = {}, {}
    files = dict(zip(("image", "label map"), _found(data, folder, NAMED), strict=True))
    for split, text in (data.splits or {split: split for split in dict.fromkeys(NAMED.values())}).items():
        path = folder / data.lists.replace("{split}", text)
        if not path.is_file():
            if data.splits:
                raise ArtifactError(f"{path}: no such file; expected the names of images, one on each line")
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.split()[0] for line in lines if line.strip()]
        for name in names:
            if without := [what for what, known in files.items() if ("", name) not in known]:
                raise ArtifactError(
                    f"{path}: expected names of images with a label map, found {name} without {without[0]}"
                )
            if name in seen:
                raise ArtifactError(f"{path}: expected each name in one list, once, found {name} also in {seen[name]}")
            seen[name] = split
        found[split] = [tuple(known["", name] for known in files.values()) for name in names]
    if not found:
        raise ArtifactError(f"{folder}: expected lists {data.lists}, found none")
    return found


# Splits


def _completed(folder, data, found):
    """Splits, with fit, choice and test of val where they are not there, or of train, which then has the rest."""
    missing = [split for split in MADE[1:] if split not in found and getattr(data.shares, split)]
    given, splits = ("val", missing) if "val" in found else ("train", ["train", *missing])
    # What is too few to part stays whole: a training needs no other splits.
    if not missing or len(found.get(given, ())) < len(splits):
        return found
    return found | _parted(folder, data, found[given], splits)


def _parted(folder, data, pairs, splits, *, copies=False):
    """Pairs in these splits by their shares: where an image goes follows from its name and the seed alone.

    Images of one group go together, and where `copies` says so those of the same bytes. A split that would have none
    takes the group next to it. Raises `ArtifactError` for fewer groups than splits.
    """
    splits = [split for split in splits if getattr(data.shares, split)]
    ends = np.cumsum([getattr(data.shares, split) for split in splits])
    first, groups = _copies([path for path, _ in pairs]) if copies else {}, {}
    for pair in pairs:
        name = first.get(pair[0], pair[0]).stem
        match = re.match(data.group, name) if data.group else None
        digest = hashlib.blake2b(f"{data.seed}/{match[0] if match else name}".encode(), digest_size=8).digest()
        groups.setdefault(int.from_bytes(digest) / 2**64, []).append(pair)
    if len(groups) < len(splits):
        raise ArtifactError(
            f"{folder}: expected images of at least {len(splits)} names or groups, one for each of "
            f"{', '.join(splits)}, found {len(groups)}"
        )
    places = np.array(sorted(groups))
    at = np.searchsorted(ends / ends[-1], places, "right").clip(max=len(splits) - 1)
    while len(empty := np.flatnonzero(np.bincount(at, minlength=len(splits)) == 0)):
        counts = np.bincount(at, minlength=len(splits))
        others = np.flatnonzero(counts[at] > 1)
        at[others[np.abs(places[others] - ends[empty[0]] / ends[-1]).argmin()]] = empty[0]
    found = {split: [] for split in splits}
    for place, split in zip(places, at, strict=True):
        found[splits[split]] += groups[place]
    return {split: sorted(each, key=lambda pair: pair[0]) for split, each in found.items()}


def _copies(paths):
    """``{file: the first one of the same bytes}`` of those that have a copy."""
    found = {}

    def parted(group, key):
        for _, each in groupby(sorted(group, key=key), key):
            if len(each := list(each)) > 1:
                yield sorted(each)

    for same in parted(paths, lambda path: path.stat().st_size):
        for alike in parted(same, lambda path: _digest(path, HEAD)):
            for copies in parted(alike, _digest):
                found |= dict.fromkeys(copies, copies[0])
    return found


def _digest(path, most=-1):
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(most)).digest()
