"""Recorded rows can be read, say what made them, and are written as they were."""

import csv
from pathlib import Path

import pytest

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright_study import experiments, provenance
from tilewright_study.measure import rows as _rows
from tilewright_study.stages import experiment, record
from tilewright_study.tables import _quoted

EXPECTED = Path(__file__).parents[2] / "expected"
RAGGED = {"provider": "sdpa_flash"}


def write(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def test_rows_of_other_columns_fail(tmp_path):
    row_type = experiments.member("attention").Row
    columns = row_type.columns()
    row = {"kind": "attention", "version": _rows.version_of(row_type), "model": "vil-tiny-64-s1"}
    path = tmp_path / "baselines.csv"
    kept = [name for name in columns if name not in ("commit", "code")]
    write(path, kept, [row])
    message = (
        r"baselines\.csv: expected the columns of attention rows, found \['code', 'commit'\] missing and \[\] more"
    )
    with pytest.raises(ArtifactError, match=message):
        _rows.read(path, experiments.row_types())
    write(path, [*columns, "model"], [row])
    with pytest.raises(ArtifactError, match="or some twice"):
        _rows.read(path, experiments.row_types())
    write(path, [*columns[:2], *columns[:1:-1]], [row])
    assert _rows.read(path, experiments.row_types())[1][0]["model"] == row["model"]


def test_what_is_written_names_the_commit_and_the_code(tmp_path):
    path = tmp_path / "logs" / "orders" / "times.csv"
    stated = ["workloads=[vil-tiny-64-s1]", "orders=[none, ic]"]
    how = {"device": "cpu", "dtype": "float32", "rse": 1.0, "min_repetitions": 3, "seed": 0}
    experiment.run("orders", "times", path, **how, stated=stated)
    _, rows = _rows.read(path, experiments.row_types())
    assert list(rows[0])[-3:] == ["commit", "code", "time"]
    assert {row["commit"] for row in rows} == {provenance.commit()} and len({row["code"] for row in rows}) == 2


# What is recorded


def recorded():
    """Folders of recorded runs."""
    return sorted(path.parent for path in EXPECTED.glob("*/run.json"))


def rows_of(folder):
    """``{experiment: rows}`` of a recorded run."""
    found = {path: _rows.read(path, experiments.row_types()) for path in folder.glob("*.csv")}
    assert {path.stem: kind for path, (kind, _) in found.items()} == {path.stem: path.stem for path in found}
    return {kind: rows for kind, rows in found.values()}


def test_a_recorded_run_is_a_file_for_each_experiment_and_what_they_are():
    assert {path.name for path in recorded()} == {Path(folder).name for folder in _quoted.FOLDERS.values()}
    for folder in recorded():
        rows = rows_of(folder)
        assert {path.name for path in folder.iterdir()} == {record.RUN, *(f"{name}.csv" for name in rows)}
        stated = artifacts.read_json(folder / record.RUN, record.KIND, record.VERSION)
        whole = record.facts([row for own in rows.values() for row in own])
        assert stated | whole == stated
        assert stated["experiments"] == {name: record.facts(own) for name, own in rows.items()}
        # Of several days and machines, as long as they say so.
        assert "not one command, commit, machine and sitting" in str(stated.get("notes")) or len(whole["commit"]) == 1


def test_every_recorded_row_has_the_types_of_its_columns():
    for folder in recorded():
        for kind, rows in rows_of(folder).items():
            # Written again, they are the same.
            again = csv.DictReader(_rows.text(experiments.member(kind).Row, rows).splitlines())
            assert list(again) == rows, folder


# Reading


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected rows that begin with kind and version"),
        ("kind,version\n", "expected at least one row, found none"),
        ("kind,version\npie,1\n", "expected rows of one of attention, .*, found pie"),
        ("kind,version\nragged,7\n", "expected version 1 of ragged rows, found 7"),
        ("kind,version\nragged,1\npruned,1\n", "expected rows of one of .*, found pruned, ragged"),
        ("kind,version,heads\nragged,1,3\n", "expected the columns of ragged rows, found .*'call'.* missing"),
    ],
    ids=["empty", "header", "kind", "version", "mixed", "columns"],
)
def test_what_is_no_file_of_rows_is_refused(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ArtifactError, match=rf"x\.csv: {message}"):
        _rows.read(tmp_path / "x.csv", experiments.row_types())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetitions": "many"}, "ragged row: .*repetitions"),
        ({"status": "fine"}, "ragged row: Invalid enum value 'fine'"),
        ({"fade": 1}, "ragged row: .*unknown field `fade`"),
        ({"kind": "pruned"}, "ragged row: Invalid enum value 'pruned'"),
    ],
)
def test_a_row_of_other_columns_or_types_is_never_written(tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message):
        _rows.write(tmp_path / "x.csv", experiments.member("ragged").Row, [RAGGED | changes])
    assert not (tmp_path / "x.csv").exists()


def test_no_rows_are_no_file(tmp_path):
    with pytest.raises(ArtifactError, match="expected at least one ragged row to write, found none"):
        _rows.write(tmp_path / "x.csv", experiments.member("ragged").Row, [])
    assert not (tmp_path / "x.csv").exists()
