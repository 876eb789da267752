"""ADE20K as of the MIT Scene Parsing Benchmark: 150 classes (Zhou et al., 2017).

``FOLDER/images/{training,validation}/*.jpg`` and ``FOLDER/annotations/{training,validation}/*.png``; 0 is no class, and
classes count from 1. Their names are those of ``FOLDER/objectInfo150.txt``, where it is there.
"""

from tilewright.core.errors import ArtifactError
from tilewright_study.scenes import labels
from tilewright_study.scenes.sources import _files

CLASSES = 150


def create(folder=None):
    """Images of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "ADE20K (ADEChallengeData2016)")
    named = folder / "objectInfo150.txt"
    data = labels.made(
        named,
        classes=_names(named),
        values=tuple(range(1, CLASSES + 1)),
        ignore=(0,),
        images="images/{split}/{name}",
        labels="annotations/{split}/{name}",
        splits={"train": "training", "val": "validation"},
    )
    return _files.source(data, folder)


def _names(path):
    """Names of the classes: the last column, of which the first of several words counts, where it is one of a class."""
    if not path.is_file():
        return tuple(f"class {label + 1}" for label in range(CLASSES))
    try:
        rows = path.read_text(encoding="utf-8").splitlines()[1 : CLASSES + 1]
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: expected names of classes in UTF-8, found others: {error}") from None
    if len(rows) < CLASSES:
        raise ArtifactError(f"{path}: expected a line of headings and {CLASSES} classes, found {len(rows)} of these")
    names = [row.split("\t")[-1].strip() for row in rows]
    first = [name.split(",")[0] for name in names]
    # Two are called screen.
    return tuple(name if first.count(short) > 1 else short for name, short in zip(names, first, strict=True))
