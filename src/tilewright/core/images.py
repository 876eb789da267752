"""Real photographs, for patterns that depend on the image: those that scikit-image carries, or the user's own.

scikit-image installs these files with the package, so that nothing is fetched. Their licences are those stated in the
docstrings of `skimage.data`.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core import registry, sides
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

# Gray ones, three surfaces and a man with a camera: no patterns are made of them, and no network is trained on them.
GRAY = {
    "brick": Photograph("brick.png", (512, 512), "CC0", "CC0Textures"),
    "camera": Photograph("camera.png", (512, 512), "CC0", "Lav Varshney"),
    "grass": Photograph("grass.png", (512, 512), "CC0", "linolafett, DeviantArt"),
    "gravel": Photograph("gravel.png", (512, 512), "CC0", "CC0Textures"),
}


# Modes of Pillow whose conversion to RGB keeps what is seen.
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")


def path(name_or_path: Path | str) -> Path:
    """Where a photograph lies: one of `PHOTOGRAPHS` by name, else a file of the user's.

    Raises `UnknownNameError` for what is neither a known name nor a file.
    """
    if name_or_path in PHOTOGRAPHS:
        return _carried(PHOTOGRAPHS[name_or_path])
    if not Path(name_or_path).is_file():
        raise UnknownNameError("photograph (nor a file)", str(name_or_path), PHOTOGRAPHS)
    return Path(name_or_path)


def load(name_or_path: Path | str, size: tuple[int, int] | int) -> np.ndarray:
    """A photograph as float32 [3, height, width] in 0..1: resized until it covers `size`, the middle cut out.

    size: a side of a square, or height and width. Resampling is bicubic. Raises `UnknownNameError` as `path` does, and
    `ArtifactError` for what is no RGB image.
    """
    return _cut(path(name_or_path), size, "RGB")


def gray(name: str, size: tuple[int, int] | int) -> np.ndarray:
    """One of `GRAY`, as `load` gives those of `PHOTOGRAPHS`: float32 [3, height, width], its channels equal.

    Raises `UnknownNameError`.
    """
    registry.check("gray photograph", name, GRAY)
    return _cut(_carried(GRAY[name]), size, "L").repeat(3, axis=0)


def opened(where: Path | str) -> Any:
    """The image of a file as it is meant to be looked at: turned as its EXIF data says, with the file's ``format``.

    Raises `ArtifactError`.
    """
    Image, ImageOps = _pillow()
    try:
        with Image.open(where) as image:
            turned = ImageOps.exif_transpose(image)
            turned.load()
            turned.format = image.format
    except FileNotFoundError:
        raise ArtifactError(f"{where}: no such file; expected an image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ArtifactError(f"{where}: expected an image, found: {error}") from error
    return turned


def read_rgb(where: str) -> np.ndarray:
    """The image of a file in 8-bit RGB; gray levels of 16 bits are scaled to 8.

    Raises `ArtifactError` for what is no image, and for one whose white is not known.
    """
    Image, _ = _pillow()
    image = opened(where)
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        # Pillow's own conversion cuts them at 255.
        levels = np.asarray(image).astype(np.int64)
        if image.mode == "I" and image.format not in ("PNG", "PPM") and levels.max() <= 255:
            raise ArtifactError(
                f"{where}: expected gray levels of 8 or 16 bits, found 32 bits of at most {levels.max()}; convert it"
            )
        if levels.min() < 0 or levels.max() > 65535:
            raise ArtifactError(
                f"{where}: expected gray levels from 0 to 65535, found {levels.min()} to {levels.max()}; convert it"
            )
        image = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode not in EIGHT_BITS:
        raise ArtifactError(f"{where}: expected an image of mode {', '.join(EIGHT_BITS)}, found {image.mode}")
    return image.convert("RGB")


def _carried(photograph):
    need("skimage", "photographs", "study")
    return Path(str(files("skimage") / "data" / photograph.file))


def _pillow():
    """Pillow's modules ``Image`` and ``ImageOps``. Raises `Unavailable` where it is not installed."""
    return need("PIL.Image", "images", "study"), need("PIL.ImageOps", "images", "study")


def _cut(where, size, mode):
    """float32 [channels, height, width] of a file of this mode."""
    Image, ImageOps = _pillow()
    image = opened(where)
    if image.mode != mode:
        raise ArtifactError(f"{where}: expected an {mode} image, found mode {image.mode}; convert it first")
    height, width = sides.pair(size)
    cut = np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC), np.float32)
    return cut.reshape(height, width, -1).transpose(2, 0, 1) / 255
