"""Recorded rows are those of today's code, or it is said why they still stand."""

import csv
from pathlib import Path

import pytest

from tilewright import targets
from tilewright.core import provenance
from tilewright.core.errors import ArtifactError
from tilewright.study import experiments, recorded
from tilewright.study.experiments import _rows
from tilewright.study.stages import convert, experiment
from tilewright.study.tables import _read

EXPECTED = Path(__file__).parents[2] / "expected"
RECORDED = sorted(path.parent for path in EXPECTED.glob("*/logs"))
# A row of each kind, as far as it decides what made it.
ROWS = {
    "attention": {"model": "vil-tiny-64-s1", "reorder": "window", "provider": "tilewright", "solver": "highs"},
    "networks": {"network": "vil-tiny-224", "attention": "tilewright"},
    "ragged": {"provider": "sdpa_flash"},
    "pruned": {"network": "deit-small-224-evit", "batching": "ragged", "pruner": "evit"},
    "slices": {"provider": "tilewright", "chosen_by": "pooled32"},
    "recall": {"provider": "flex", "chosen_by": "oracle"},
    "video": {"network": "wan-1.3b-480p-81f", "by": "slices"},
    "paths": {"network": "segformer-b0-512", "data": "scenes"},
    "stream": {"network": "segformer-b0-512"},
    "heatmap": {"reorder": "window", "solver": "highs"},
    "orders": {"model": "vil-tiny-64-s1", "reorder": "ic"},
    "pruned_accuracy": {"network": "deit-tiny-224", "batching": "ragged", "pruner": "evit"},
    "accelerator": {"network": "segformer-b0-512"},
    "configure": {"stream": "identity-16x16", "engine": "fit"},
    "push": {"app": "gaussian-64", "memory": "pub"},
    "push_attention": {"model": "vil-tiny-224-s1"},
    "push_streams": {"model": "vil-tiny-224-s1", "reorder": "hc"},
    "worth": {"provider": "tilewright", "reorder": "window", "solver": "highs"},
}


def write(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def record(folder, kind="attention", device="cpu", **changes):
    """Write a recorded file with one row of today's code, but for `changes`."""
    row = ROWS[kind] | recorded.origin(kind, ROWS[kind], device) | changes
    path = folder / "logs" / "a" / f"{kind}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    _rows.write(path, experiments.member(kind).Row, [row])
    return row


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_recorded_rows_are_of_todays_code(folder):
    recorded.check(folder)


@pytest.mark.parametrize("device", targets.NAMES)
@pytest.mark.parametrize("kind", experiments.NAMES)
def test_rows_of_today_pass(tmp_path, kind, device):
    record(tmp_path, kind, device)
    recorded.check(tmp_path)
    assert recorded.older(tmp_path) == []


def test_rows_of_other_columns_fail(tmp_path):
    row_type = experiments.member("attention").Row
    columns = row_type.columns()
    row = ROWS["attention"] | {"kind": "attention", "version": _rows.version_of(row_type)}
    kept = [name for name in columns if name not in ("commit", "code")]
    write(tmp_path / "logs" / "baselines.csv", kept, [row])
    message = (
        r"baselines\.csv: expected the columns of attention rows, found \['code', 'commit'\] missing and \[\] more"
    )
    with pytest.raises(ArtifactError, match=message):
        recorded.check(tmp_path)
    write(tmp_path / "logs" / "baselines.csv", [*columns[:2], *columns[:1:-1]], [row])
    with pytest.raises(ArtifactError, match="or another order"):
        recorded.check(tmp_path)


@pytest.mark.parametrize("changes", [{"code": "0123456789abcdef"}, {"provider": "gone"}], ids=["digest", "module"])
def test_rows_of_older_code_fail_until_they_are_explained(tmp_path, changes):
    row = record(tmp_path, **changes, commit="abc1234")
    record(tmp_path, "ragged")
    with pytest.raises(
        ArtifactError, match=rf"found 1 in logs/a/attention\.csv of code '{row['code']}', commit 'abc1234'"
    ):
        recorded.check(tmp_path)
    entry = {"code": row["code"], "commit": "abc1234", "what": "peers", "since": "a docstring", "why": "nothing timed"}
    write(tmp_path / "older.csv", recorded.OLDER_COLUMNS, [entry])
    recorded.check(tmp_path)
    assert recorded.older(tmp_path) == [{"path": "logs/a/attention.csv", "rows": 1, **entry}]


def test_the_code_of_another_module_is_older(tmp_path):
    ours, theirs = (
        recorded.origin("attention", ROWS["attention"] | {"provider": p}, "cpu") for p in ("tilewright", "flex")
    )
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
    path = tmp_path / "logs" / "orders" / "times.csv"
    stated = ["workloads=[vil-tiny-64-s1]", "orders=[none, ic]"]
    how = {"device": "cpu", "dtype": "float32", "rse": 1.0, "min_repetitions": 3, "seed": 0}
    experiment.run("orders", "times", path, **how, stated=stated)
    _, rows = _rows.read(path, experiments.row_types())
    assert list(rows[0])[-3:] == ["commit", "code", "time"]
    assert {row["commit"] for row in rows} == {provenance.commit()} and len({row["code"] for row in rows}) == 2
    recorded.check(tmp_path)


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
        _rows.write(tmp_path / "x.csv", experiments.member("ragged").Row, [ROWS["ragged"] | changes])
    assert not (tmp_path / "x.csv").exists()


def test_no_rows_are_no_file(tmp_path):
    with pytest.raises(ArtifactError, match="expected at least one ragged row to write, found none"):
        _rows.write(tmp_path / "x.csv", experiments.member("ragged").Row, [])
    assert not (tmp_path / "x.csv").exists()
