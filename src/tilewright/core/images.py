"""Real photographs, for patterns that depend on the image: those that scikit-image carries, or the user's own.

scikit-image installs these files with the package, so that nothing is fetched. Their licences are those stated in the
docstrings of `skimage.data`.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ArtifactError, UnknownNameError, need


@dataclass(frozen=True)
class Photograph:
    """A file of scikit-image's ``data`` folder, its size in pixels (width, height), and whom it is owed to."""

    file: str
    size: tuple[int, int]
    licence: str
    credit: str


PHOTOGRAPHS = {
    "astronaut": Photograph("astronaut.png", (512, 512), "public domain", "NASA Great Images database"),
    "chelsea": Photograph("chelsea.png", (451, 300), "CC0", "Stefan van der Walt"),
    "coffee": Photograph("coffee.png", (600, 400), "CC0", "Rachel Michetti, courtesy of Pikolo Espresso Bar"),
    "hubble_deep_field": Photograph("hubble_deep_field.jpg", (1000, 872), "public domain", "NASA, HubbleSite"),
    "retina": Photograph(
        "retina.jpg",
        (1411, 1411),
        "CC0",
        "Mikael Häggström, WikiJournal of Medicine 1 (2), 2014, Wikimedia Commons",
    ),
    "rocket": Photograph("rocket.jpg", (640, 427), "public domain", "SpaceX"),
}

# Modes of images that are turned into RGB.
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr")
# Endings of images in a folder.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def path(name_or_path: Path | str) -> Path:
    """Where a photograph lies: one of `PHOTOGRAPHS` by name, else a file of the user's.

    Raises `UnknownNameError` for what is neither a known name nor a file.
    """
    if name_or_path in PHOTOGRAPHS:
        return carried(PHOTOGRAPHS[name_or_path])
    if not Path(name_or_path).is_file():
        raise UnknownNameError("photograph (nor a file)", str(name_or_path), PHOTOGRAPHS)
    return Path(name_or_path)


def load(name_or_path: Path | str, size: tuple[int, int] | int) -> np.ndarray:
    """A photograph as float32 [3, height, width] in 0..1: resized until it covers `size`, the middle cut out.

    size: a side of a square, or height and width. Resampling is bicubic. Raises `UnknownNameError` as `path` does, and
    `ArtifactError` for what is no RGB image.
    """
    return cut(path(name_or_path), size, "RGB")


def files_of(folder: Path | str, what: str = "a folder of images") -> list[Path]:
    """Images of a folder by name. Raises `ArtifactError` for what has none."""
    folder = Path(folder)
    found = sorted(x for x in folder.iterdir() if x.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not found:
        raise ArtifactError(f"{folder}: expected {what} ({', '.join(SUFFIXES)}), found none")
    return found


def opened(where: Path | str) -> Any:
    """The image of a file as it is meant to be looked at: turned as its EXIF data says, with the file's ``format``.

    Raises `ArtifactError`.
    """
    Image, _ = _pillow()
    try:
        with Image.open(where) as image:
            found = turned(image)
            found.format = image.format
    except FileNotFoundError:
        raise ArtifactError(f"{where}: no such file; expected an image") from None
    except IsADirectoryError:
        raise ArtifactError(f"{where}: expected an image, found a folder") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ArtifactError(f"{where}: expected an image, found: {error}") from error
    return found


def rgb(where: Path | str) -> Any:
    """As `opened`, in RGB. Raises `ArtifactError`, also for an image whose numbers are no colours."""
    found = opened(where)
    if found.mode not in MODES:
        raise ArtifactError(f"{where}: expected an image of 8 bits ({', '.join(MODES)}), found mode {found.mode}")
    return found if found.mode == "RGB" else found.convert("RGB")


def turned(image: Any) -> Any:
    """An image of Pillow, turned as its EXIF data says, with its pixels read. Raises what Pillow raises."""
    found = _pillow()[1].exif_transpose(image)
    found.load()
    return found


def carried(photograph: Photograph) -> Path:
    """The file of a photograph."""
    need("skimage", "photographs", "study")
    return Path(str(files("skimage") / "data" / photograph.file))


def _pillow():
    """Pillow's modules ``Image`` and ``ImageOps``. Raises `Unavailable` where it is not installed."""
    return need("PIL.Image", "images", "study"), need("PIL.ImageOps", "images", "study")


def cut(where: Path | str, size: tuple[int, int] | int, mode: str) -> np.ndarray:
    """float32 [channels, height, width] of a file of this mode."""
    Image, ImageOps = _pillow()
    image = opened(where)
    if image.mode != mode:
        raise ArtifactError(f"{where}: expected an {mode} image, found mode {image.mode}; convert it first")
    height, width = sides.pair(size)
    found = np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC), np.float32)
    return found.reshape(height, width, -1).transpose(2, 0, 1) / 255
