"""The objects that scenes are made of: pictures with an opacity, each of a class.

``objects.webp`` is one sheet of square cells, ``objects.csv`` tells what is in them, row by row. Both are made by
``workflow/scripts/make_objects.py``. A fifth of the objects of each class is ``novel``: no network is trained on them.

The pictures are those of Noto Color Emoji, under the licence of ``LICENSE.objects``.
"""

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from tilewright.core.errors import ArtifactError

FIELDS = ("code_point", "name", "class", "split")
# Side of a cell in pixels, and cells of a row of the sheet.
CELL, COLUMNS = 128, 32


class Objects(NamedTuple):
    """Objects of the sheet. names: of each. labels: int64, of the class of each, from 1. novel: bool of each.

    classes: of the labels, ``background`` first.
    """

    names: tuple[str, ...]
    labels: np.ndarray
    novel: np.ndarray
    classes: tuple[str, ...]


@cache
def table():
    """The `Objects` of the sheet."""
    with (files(__package__) / "objects.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    classes = ("background", *dict.fromkeys(row["class"] for row in rows))
    labels = np.array([classes.index(row["class"]) for row in rows])
    novel = np.array([row["split"] == "novel" for row in rows])
    return Objects(tuple(row["name"] for row in rows), labels, novel, classes)


def pictures():
    """uint8 [objects, CELL, CELL, 4]: red, green and blue, times their opacity, and the opacity.

    Raises `ArtifactError` for a sheet of another table.
    """
    from PIL import Image

    with (files(__package__) / "objects.webp").open("rb") as stream, Image.open(stream) as opened:
        sheet = np.asarray(opened.convert("RGBA"))
    count = len(table().names)
    rows = -(-count // COLUMNS)
    if sheet.shape != (rows * CELL, COLUMNS * CELL, 4):
        expected = [rows * CELL, COLUMNS * CELL]
        raise ArtifactError(f"objects.webp: expected {expected} pixels for {count} objects, found {[*sheet.shape[:2]]}")
    found = sheet.reshape(rows, CELL, COLUMNS, CELL, 4).swapaxes(1, 2).reshape(-1, CELL, CELL, 4)[:count].copy()
    times = found[..., :3].astype(np.uint16) * found[..., 3:] + 127
    found[..., :3] = times // 255
    return found
