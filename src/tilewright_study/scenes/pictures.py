"""Pictures beside those that patterns are made of: gray photographs, and files of any mode."""

from pathlib import Path

import numpy as np
from PIL import Image

from tilewright.core import registry
from tilewright.core.errors import ArtifactError
from tilewright.core.images import PHOTOGRAPHS, Photograph, carried, cut, opened

# Gray ones, three surfaces and a man with a camera: no patterns are made of them, and no network is trained on them.
GRAY = {
    "brick": Photograph("brick.png", (512, 512), "CC0", "CC0Textures"),
    "camera": Photograph("camera.png", (512, 512), "CC0", "Lav Varshney"),
    "grass": Photograph("grass.png", (512, 512), "CC0", "linolafett, DeviantArt"),
    "gravel": Photograph("gravel.png", (512, 512), "CC0", "CC0Textures"),
}
# Ten files to try a network on, of all sizes and modes.
EXAMPLE = PHOTOGRAPHS | {
    "camera": GRAY["camera"],
    "clock_motion": Photograph("clock_motion.png", (400, 300), "public domain", "Stefan van der Walt"),
    "coins": Photograph("coins.png", (384, 303), "no known copyright restrictions", "Brooklyn Museum"),
    "ihc": Photograph("ihc.png", (512, 512), "no known copyright restrictions", "CMMI"),
}
# Modes of Pillow whose conversion to RGB keeps what is seen.
EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")


def gray(name: str, size: tuple[int, int] | int) -> np.ndarray:
    """One of `GRAY`, as `load` gives those of `PHOTOGRAPHS`: float32 [3, height, width], its channels equal.

    Raises `UnknownNameError`.
    """
    registry.check("gray photograph", name, GRAY)
    return cut(carried(GRAY[name]), size, "L").repeat(3, axis=0)


def read_rgb(where: Path | str) -> Image.Image:
    """The image of a file in 8-bit RGB; gray levels of 16 bits are scaled to 8.

    Raises `ArtifactError` for what is no image, and for one whose white is not known.
    """
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
