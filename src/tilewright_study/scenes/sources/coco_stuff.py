"""COCO-Stuff: 171 classes of things and stuff (Caesar, Uijlings and Ferrari, 2018).

``FOLDER/images/{train,val}2017/*.jpg`` and ``FOLDER/annotations/{train,val}2017/*.png``, the maps of
stuffthingmaps_trainval2017. Their names are those of ``FOLDER/labels.txt``, where it is there.
"""

from tilewright.core.errors import ArtifactError
from tilewright_study.scenes import labels
from tilewright_study.scenes.sources import _files

# Published numbers count from 1 and leave these out; maps count from 0.
LABELS, MISSING = 182, (12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91)
NUMBERS = tuple(number for number in range(1, LABELS + 1) if number not in MISSING)


def create(folder=None):
    """Images of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "COCO-Stuff (images and annotations of train2017 and val2017)")
    named = folder / "labels.txt"
    data = labels.made(
        named,
        classes=_names(named),
        values=tuple(number - 1 for number in NUMBERS),
        images="images/{split}/{name}",
        labels="annotations/{split}/{name}",
        splits={"train": "train2017", "val": "val2017"},
    )
    return _files.source(data, folder)


def _names(path):
    """Names of the classes, of lines such as ``1: person``."""
    if not path.is_file():
        return tuple(f"class {number}" for number in NUMBERS)
    try:
        lines = dict(line.split(": ", 1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        return tuple(lines[str(number)].strip() for number in NUMBERS)
    except (UnicodeDecodeError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: expected lines such as '1: person' to {LABELS}, found others: {error}") from None
