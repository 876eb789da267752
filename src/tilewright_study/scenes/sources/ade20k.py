"""ADE20K as of the MIT Scene Parsing Benchmark: 150 classes (Zhou et al., 2017).

``FOLDER/images/{training,validation}/*.jpg`` and ``FOLDER/annotations/{training,validation}/*.png``; 0 is no class, and
classes count from 1. Their names are those of ``FOLDER/objectInfo150.txt``, where it is there.
"""

from tilewright.core.errors import ArtifactError
from tilewright_study.scenes import sources
from tilewright_study.scenes.sources import _files

CLASSES = 150


def create(folder=None):
    """Images of a folder. Raises `ConfigError` and `ArtifactError`."""
    folder = _files.folder_of(folder, "ADE20K (ADEChallengeData2016)")
    found = {}
    for split, named in (("train", "training"), ("val", "validation")):
        places = (folder / kind / named for kind in ("images", "annotations"))
        found[split] = _files.pairs(*places, lambda stem: stem)
    labels = {0: sources.VOID, **{label + 1: label for label in range(CLASSES)}}
    return _files.Labelled(_names(folder / "objectInfo150.txt"), found, _files.table(labels))


def _names(path):
    """Names of the classes: the last column, of which the first of several words counts."""
    if not path.is_file():
        return [f"class {label + 1}" for label in range(CLASSES)]
    try:
        rows = path.read_text(encoding="utf-8").splitlines()[1 : CLASSES + 1]
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: expected names of classes in UTF-8, found others: {error}") from None
    if len(rows) < CLASSES:
        raise ArtifactError(f"{path}: expected a line of headings and {CLASSES} classes, found {len(rows)} of these")
    return [row.split("\t")[-1].split(",")[0].strip() for row in rows]
