"""Recorded rows can be read, say what made them, and are written as they were."""

import csv
from pathlib import Path

import pytest

from tilewright.core import provenance
from tilewright.core.errors import ArtifactError
from tilewright.study import experiments
from tilewright.study.experiments import _rows
from tilewright.study.stages import convert, experiment
from tilewright.study.tables import _read

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
    write(path, [*columns[:2], *columns[:1:-1]], [row])
    with pytest.raises(ArtifactError, match="or another order"):
        _rows.read(path, experiments.row_types())


def test_what_is_written_names_the_commit_and_the_code(tmp_path):
    path = tmp_path / "logs" / "orders" / "times.csv"
    stated = ["workloads=[vil-tiny-64-s1]", "orders=[none, ic]"]
    how = {"device": "cpu", "dtype": "float32", "rse": 1.0, "min_repetitions": 3, "seed": 0}
    experiment.run("orders", "times", path, **how, stated=stated)
    _, rows = _rows.read(path, experiments.row_types())
    assert list(rows[0])[-3:] == ["commit", "code", "time"]
    assert {row["commit"] for row in rows} == {provenance.commit()} and len({row["code"] for row in rows}) == 2


def test_what_made_each_recorded_row_is_known():
    """Every name that a recorded row enters by is that of a module."""
    seen = set()
    for path in EXPECTED.glob("*/logs/**/*.csv"):
        kind, rows = _rows.read(path, experiments.row_types())
        seen |= set(experiments.modules(kind, rows, "cuda"))
    assert len(seen) > 30 and all(provenance._path_of(name) for name in seen)


def test_every_recorded_row_has_the_types_of_its_columns():
    for path in EXPECTED.glob("*/logs/**/*.csv"):
        kind, rows = _rows.read(path, experiments.row_types())
        row_type = experiments.member(kind).Row
        # Written again, it is the same file.
        assert _rows.text(row_type, rows) == path.read_text(), path


# Rows of the versions before

BEFORE = {
    "vil-tiny-64-s1/baselines.csv": (
        "attention",
        "model,provider,status,predicted_us,p50_us,code",
        "m,flex,ok,,2.50,c",
    ),
    "networks/vil-tiny-64.csv": ("networks", "network,attention,attention_us,code", "vil-tiny-64,native,1e3,c"),
    "ragged/3x64.csv": ("ragged", "heads,exact,provider,code", "3,True,nested,c"),
    "pruned/deit-tiny-64-evit.csv": ("pruned", "network,strategy,p50_us,code", "deit-tiny-64-evit,padded,3.0,c"),
    "heatmap/224.csv": ("heatmap", "resolution,patch,speedup,code", "224,16,1.5,c"),
    "reorder_time.csv": ("orders", "model,reorder,peak_rss_bytes,code", "m,none,123,c"),
}


def test_recorded_files_are_converted_and_read(tmp_path):
    for name, (_, columns, row) in BEFORE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{columns}\n{row}\n")
    convert.run([tmp_path])
    assert not (tmp_path / "reorder_time.csv").exists()
    found = {path: path.read_text() for path in tmp_path.rglob("*.csv")}
    assert len(found) == len(BEFORE) and tmp_path / "orders/times.csv" in found
    for kind, _, _ in BEFORE.values():
        (path,) = [path for path, text in found.items() if f"\n{kind}," in text]
        (frame,) = _read.frames([path], kind)
        assert frame["code"].tolist() == ["c"] and set(frame["kind"]) == {kind}
    (pruned,) = _read.frames([tmp_path / "pruned/deit-tiny-64-evit.csv"], "pruned")
    assert (pruned["batching"][0], pruned["p50_us"][0]) == ("padded", 3.0)
    (heat,) = _read.frames([tmp_path / "heatmap/224.csv"], "heatmap")
    assert (heat["reorder"][0], heat["solver"][0]) == ("window", "highs")
    convert.run([tmp_path])
    assert {path: path.read_text() for path in tmp_path.rglob("*.csv")} == found


def test_rows_of_networks_are_converted_from_the_first_version(tmp_path):
    path = tmp_path / "networks" / "vil-tiny-64.csv"
    path.parent.mkdir()
    path.write_text("kind,version,network,attention,p50_us,code\nnetworks,1,vil-tiny-64,tilewright,2.5,c\n")
    with pytest.raises(ArtifactError, match="expected version 2 of networks rows, found 1"):
        _read.frames([path], "networks")
    convert.run([tmp_path])
    (frame,) = _read.frames([path], "networks")
    assert frame[["p50_us", "code", "compiled", "reorder", "solver", "tiles"]].values.tolist() == [
        [2.5, "c", "False", "", "", ""]
    ]


def test_a_file_of_no_kind_is_not_converted(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArtifactError, match=r"x\.csv: expected rows of a recorded study, found the columns a, b"):
        convert.run([tmp_path])


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
