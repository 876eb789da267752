"""Recorded runs: what is there is kept, what is missing is named, and nothing else takes their place."""

import json
import os
import shutil
import signal
import threading
import time

import pytest

from helpers import synthetic
from helpers.checkout import ROOT
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright_study import experiments, provenance
from tilewright_study.measure import rows as _rows
from tilewright_study.stages import record

COMMIT = "0123456789"
# In the place of Snakemake: copies rows of an experiment as each case that is asked for and not yet there.
MEASURED = """\
import os, pathlib, shutil, sys, time
work, asked = pathlib.Path(sys.argv[sys.argv.index("--directory") + 1]), sys.argv[sys.argv.index("--") + 1 :]
here = pathlib.Path(__file__).parent
(here / "pid").write_text(str(os.getpid()))
status = 0
for path in filter(lambda path: not (work / path).exists(), asked):
    if path in os.environ.get("BROKEN", "") or not (here / pathlib.Path(path).name).exists():
        status = 1
        continue
    if path in os.environ.get("ENDLESS", ""):
        time.sleep(600)
    (work / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(here / pathlib.Path(path).name, work / path)
sys.exit(status)
"""
OVERLAY = """\
experiments: [ragged]
heatmap: {resolutions: [224, 512]}
ragged: {shapes: [[3, 64]]}
pruned: {workloads: []}
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose workflow is `MEASURED`."""
    shutil.copy(ROOT / "config.yaml", tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/box.yaml").write_text(OVERLAY)
    (tmp_path / "profiles/default").mkdir(parents=True)
    workflow = tmp_path / "src/snakemake"
    workflow.mkdir(parents=True)
    (workflow / "__main__.py").write_text(MEASURED)
    (workflow / "__init__.py").write_text("")
    facts = {"commit": COMMIT, "time": "2026-11-29T12:00:00+00:00"}
    for size in (224, 512):
        rows = [{"resolution": size, "device": "X"} | facts]
        synthetic.write_csv(workflow / f"{size}.csv", "heatmap", rows)
    synthetic.write_csv(workflow / "3x64.csv", "ragged", [synthetic.ragged_row(3, 64, "64", 64, "nested", 1.0) | facts])
    monkeypatch.setattr(provenance, "commit", lambda: COMMIT)
    return tmp_path


def made(checkout):
    """Names in the recorded run, and what it says of itself."""
    folder = checkout / "expected/box"
    return {path.name for path in folder.iterdir()}, json.loads((folder / record.RUN).read_text())


def test_what_time_ended_is_named_and_goes_on_in_the_next_call(checkout, monkeypatch):
    monkeypatch.setenv("ENDLESS", "results/logs/heatmap/512.csv")
    record.run("box", [], 0.06, checkout)
    names, said = made(checkout)
    assert names == {record.RUN, "ragged.csv", "heatmap.csv"} and said["left_out"] == {"heatmap/512": "no time"}
    assert said["rows"] == 2 and said["commit"] == [COMMIT] and len(said["minutes"]) == 1
    monkeypatch.delenv("ENDLESS")
    kept = (checkout / "build/record/box/results/logs/heatmap/224.csv").stat().st_mtime_ns
    record.run("box", [], 1, checkout)
    names, said = made(checkout)
    assert said["left_out"] == {} and said["rows"] == 3 and len(said["minutes"]) == 2
    assert (checkout / "build/record/box/results/logs/heatmap/224.csv").stat().st_mtime_ns == kept
    _, rows = _rows.read(checkout / "expected/box/heatmap.csv", experiments.row_types())
    assert [row["resolution"] for row in rows] == ["224", "512"]


def test_who_is_ended_leaves_nothing_running(checkout, monkeypatch):
    monkeypatch.setenv("ENDLESS", "results/logs/heatmap/512.csv")
    there = checkout / "build/record/box/results/logs/heatmap/224.csv"

    def end():
        while not there.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(SystemExit):
        record.run("box", [], 1, checkout)
    ending.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((checkout / "src/snakemake/pid").read_text()), 0)
    assert not (checkout / "expected").exists()


def test_calls_with_other_overlays_add_to_the_run(checkout):
    record.run("box", [], 1, checkout)
    more = checkout / "more.yaml"
    more.write_text("experiments: [heatmap]\nheatmap: {resolutions: [1024]}\n")
    record.run("box", [checkout / "config/box.yaml", more], 1, checkout)
    names, said = made(checkout)
    assert said["left_out"] == {"heatmap/1024": "failed"} and said["rows"] == 3 and "ragged.csv" in names


def test_a_case_that_failed_is_not_one_that_had_no_time(checkout, monkeypatch):
    monkeypatch.setenv("BROKEN", "results/logs/heatmap/224.csv")
    record.run("box", [], 1, checkout)
    assert made(checkout)[1]["left_out"] == {"heatmap/224": "failed"}


def test_without_minutes_nothing_is_measured(checkout):
    with pytest.raises(ArtifactError, match="build/record/box: expected the rows of a run, found none"):
        record.run("box", [], 0, checkout)
    assert not (checkout / "expected").exists()


def test_a_recorded_run_is_of_one_commit_without_changes(checkout, monkeypatch):
    record.run("box", [], 1, checkout)
    before = made(checkout)
    for commit, said in (("abc", f"expected rows of commit abc, found {COMMIT}; remove"), ("abc+", r"abc\+")):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        with pytest.raises(ConfigError, match=said):
            record.run("box", [], 1, checkout)
    assert made(checkout) == before


def test_nothing_but_a_recorded_run_is_replaced(checkout):
    (checkout / "expected/box").mkdir(parents=True)
    with pytest.raises(ConfigError, match="expected a recorded run to take the place of, found another folder"):
        record.run("box", [], 1, checkout)


def test_rows_and_digits_that_nobody_reads_are_not_kept(tmp_path):
    facts = {"commit": COMMIT, "time": "2026-11-29T12:00:00+00:00", "app": "blur"}
    rows = [{"kind": "push", "version": "1", "part": part, "tiles": "12", **facts} for part in ("whole", "live")]
    empty = dict.fromkeys(experiments.member("push").Row.columns(), "")
    rows = [empty | row | {"occupancy": "0.123456789", "last_cycle": "1234567", "map_s": "0.5"} for row in rows]
    record.write(tmp_path / "box", {"push": rows}, {})
    ((row,), said) = (
        _rows.read(tmp_path / "box/push.csv", experiments.row_types())[1],
        json.loads((tmp_path / "box" / record.RUN).read_text()),
    )
    assert (row["part"], row["occupancy"], row["last_cycle"], row["map_s"]) == ("whole", "0.123457", "1234567", "0.5")
    assert said["rows"] == 1 and said["not_kept"] == {"push": 1}
