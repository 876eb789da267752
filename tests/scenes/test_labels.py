"""Classes of label maps and their colours, from files beside one's data."""

import json

import numpy as np
import pytest

from tilewright.core.errors import ArtifactError
from tilewright_study.scenes import labels


@pytest.mark.parametrize("name", labels.FILES)
def test_classes_are_read_from_a_file_or_its_folder(name, tmp_path):
    stated = {"classes": ["sky", "road"], "palette": [[70, 130, 180], [128, 64, 128]]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in stated.items()]
    (tmp_path / name).write_text(json.dumps(stated) if name.endswith("json") else "\n".join(lines))
    for place in (tmp_path, tmp_path / name):
        found = labels.read(place)
        assert found.classes == ("sky", "road")
        assert found.colours.shape == (256, 3) and found.colours.dtype == np.uint8
        assert found.colours[:2].tolist() == stated["palette"]


def test_colours_that_are_not_stated_are_those_of_voc():
    found = labels.Labels(("a", "b")).colours
    # As its development kit has them, the last one of pixels without a label.
    assert found[[0, 1, 2, 3, 4, 20, 255]].tolist() == [
        *([0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128], [0, 64, 128], [224, 224, 192])
    ]
    assert len(np.unique(found, axis=0)) == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field `classes`"),
        ("classes = []", "length >= 1"),
        ('classes = ["a", "a"]', "expected each name once, found 'a' again"),
        ('classes = ["a"]\npalette = [[1, 2, 3], [4, 5, 6]]', "a colour for each of 1 classes, found 2"),
        ('classes = ["a"]\npalette = [[1, 2, 256]]', "<= 255"),
        ('classes = ["a"]\ncolors = []', "unknown field `colors`"),
        ("classes =", "expected classes in TOML or JSON, found"),
    ],
)
def test_files_that_name_no_classes_are_refused(text, message, tmp_path):
    (tmp_path / "data.toml").write_text(text)
    with pytest.raises(ArtifactError, match=message):
        labels.read(tmp_path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ArtifactError, match=r"expected a file data\.toml or data\.json that names its classes"):
        labels.read(tmp_path)
    with pytest.raises(ArtifactError, match="no such file"):
        labels.read(tmp_path / "classes.json")
