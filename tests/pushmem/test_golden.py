"""Every artifact of one small program, word by word.

A change that is meant: ``PYTHONPATH=src:tests python tests/pushmem/test_golden.py`` writes the texts anew.
"""

import csv
import json
import tempfile
from pathlib import Path

import pytest

from tilewright_study.stages import push_app as stage

APP = "brighten_blur-20"
TEXTS = Path(__file__).parent / "golden"
NAMES = ("mapped.json", "config.json", "run.csv")
# What differs from run to run, and from version to version of other packages.
VOLATILE = ("made_by", "seconds", "compile_s", "run_s")


def texts(folder):
    """The artifacts' texts by name, without times."""
    mapped = stage.map_app(APP, "pub", folder)
    stage.configure_app(mapped, "pub", folder)
    stage.run_app(APP, mapped, "pub", folder, hardware=False)
    found = {}
    for name in NAMES:
        text = (Path(folder) / name).read_text()
        if name.endswith(".json"):
            kept = {key: value for key, value in json.loads(text).items() if key not in VOLATILE}
            found[name] = json.dumps(kept, indent=1, sort_keys=True) + "\n"
        else:
            (row,) = csv.DictReader(text.splitlines())
            found[name] = "".join(f"{key}: {value}\n" for key, value in row.items() if key not in VOLATILE)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_artifact_is_what_it_was(name, tmp_path):
    assert texts(tmp_path)[name] == (TEXTS / name).read_text()


if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts(folder).items():
            (TEXTS / name).write_text(text)
