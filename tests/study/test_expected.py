"""Recorded rows are those of today's code, or it is said why they still stand."""

import csv
from pathlib import Path

import pandas as pd
import pytest

from tilewright import targets
from tilewright.core import provenance
from tilewright.core.errors import ArtifactError
from tilewright.study import recorded
from tilewright.study.bench import stage

EXPECTED = Path(__file__).parents[2] / "expected"
RECORDED = sorted(path.parent for path in EXPECTED.glob("*/logs"))
# A row of each kind, as far as it decides what made it.
ROWS = {
    "bench": {"model": "vil-tiny-64-s1", "reorder": "window", "provider": "tilewright", "solver": "highs"},
    "network": {"network": "vil-tiny-224", "attention": "tilewright"},
    "ragged": {"provider": "sdpa_flash"},
    "pruned": {"network": "deit-small-224-evit", "strategy": "ragged", "pruner": "evit"},
    "heatmap": {},
    "reorder_time": {"model": "vil-tiny-64-s1", "reorder": "ic"},
}


def write(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def record(folder, kind="bench", device="cpu", **changes):
    """Write a recorded file with one row of today's code, but for `changes`."""
    row = ROWS[kind] | recorded.origin(kind, ROWS[kind], device) | changes
    write(folder / "logs" / "a" / f"{kind}.csv", recorded.KINDS[kind].columns, [row])
    return row


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_recorded_rows_are_of_todays_code(folder):
    recorded.check(folder)


@pytest.mark.parametrize("device", targets.NAMES)
@pytest.mark.parametrize("kind", recorded.KINDS)
def test_rows_of_today_pass(tmp_path, kind, device):
    record(tmp_path, kind, device)
    recorded.check(tmp_path)
    assert recorded.older(tmp_path) == []


def test_rows_of_other_columns_fail(tmp_path):
    columns = [name for name in recorded.KINDS["bench"].columns if name not in ("commit", "code")]
    write(tmp_path / "logs" / "baselines.csv", columns, [ROWS["bench"]])
    message = r"baselines\.csv: expected .*today's bench rows, found \['code', 'commit'\] missing and \[\] more"
    with pytest.raises(ArtifactError, match=message):
        recorded.check(tmp_path)
    write(tmp_path / "logs" / "baselines.csv", recorded.KINDS["bench"].columns[::-1], [])
    with pytest.raises(ArtifactError, match="or another order; record it again"):
        recorded.check(tmp_path)


@pytest.mark.parametrize("changes", [{"code": "0123456789abcdef"}, {"provider": "gone"}], ids=["digest", "module"])
def test_rows_of_older_code_fail_until_they_are_explained(tmp_path, changes):
    row = record(tmp_path, **changes, commit="abc1234")
    record(tmp_path, "ragged")
    with pytest.raises(ArtifactError, match=rf"found 1 in logs/a/bench\.csv of code '{row['code']}', commit 'abc1234'"):
        recorded.check(tmp_path)
    entry = {"code": row["code"], "commit": "abc1234", "what": "peers", "since": "a docstring", "why": "nothing timed"}
    write(tmp_path / "older.csv", recorded.OLDER_COLUMNS, [entry])
    recorded.check(tmp_path)
    assert recorded.older(tmp_path) == [{"path": "logs/a/bench.csv", "rows": 1, **entry}]


def test_the_code_of_another_module_is_older(tmp_path):
    ours, theirs = (recorded.origin("bench", ROWS["bench"] | {"provider": p}, "cpu") for p in ("tilewright", "flex"))
    assert ours["code"] != theirs["code"]
    record(tmp_path, code=theirs["code"])
    with pytest.raises(ArtifactError, match="expected rows of today's code"):
        recorded.check(tmp_path)


@pytest.mark.parametrize("code", ["0123456789abcdef", None], ids=["of-no-row", "of-today"])
def test_an_explanation_of_no_older_row_fails(tmp_path, code):
    row = record(tmp_path)
    entry = {"code": code or row["code"], "commit": row["commit"], "what": "all", "since": "then", "why": "so"}
    write(tmp_path / "older.csv", recorded.OLDER_COLUMNS, [entry])
    with pytest.raises(
        ArtifactError, match=rf"older\.csv: expected entries of older rows, found none of code {entry['code']}"
    ):
        recorded.check(tmp_path)


@pytest.mark.parametrize(
    ("columns", "entry"),
    [(recorded.OLDER_COLUMNS, {"code": "0", "commit": "0", "what": "all", "since": "then"}), (("code", "why"), {})],
    ids=["no-reason", "columns"],
)
def test_an_incomplete_explanation_fails(tmp_path, columns, entry):
    write(tmp_path / "older.csv", columns, [entry])
    with pytest.raises(ArtifactError, match=r"older\.csv: expected code, commit, what, since, why, none of them blank"):
        recorded.check(tmp_path)


def test_what_is_written_is_of_today(tmp_path):
    arguments = dict.fromkeys(stage.MODES) | {"reorder_times": ["vil-tiny-64-s1"], "orders": ["none", "ic"]}
    path = tmp_path / "logs" / "reorder_time.csv"
    stage.run([path], "cpu", rse=1.0, min_repetitions=3, max_seconds=0.01, **arguments)
    frame = pd.read_csv(path, dtype=str)
    assert list(frame.columns)[-3:] == ["commit", "code", "time"]
    assert set(frame["commit"]) == {provenance.commit()} and frame["code"].nunique() == 2
    recorded.check(tmp_path)


def test_what_made_each_recorded_row_is_known():
    """Every name that a recorded row enters by is that of a module."""
    seen = set()
    for path in EXPECTED.glob("*/logs/**/*.csv"):
        with open(path, newline="") as stream:
            rows = list(csv.DictReader(stream))
        columns = {*rows[0]}
        kind = max(recorded.KINDS, key=lambda kind: len({*recorded.KINDS[kind].columns} & columns))
        for row in rows:
            modules = recorded.KINDS[kind].entered(row, "cuda")
            seen |= {name if name.startswith("tilewright.") else f"tilewright.{name}" for name in modules}
    assert len(seen) > 30 and all(provenance._path_of(name) for name in seen)
