"""What a run of an experiment leaves that does not end: its rows so far, beside the output and not in it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cases import rest_slow
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright_study import experiments
from tilewright_study.experiments import orders as member
from tilewright_study.measure import rows as _rows
from tilewright_study.stages import experiment

HOW = {"device": "cpu", "dtype": "float32", "rse": 1.0, "min_repetitions": 3, "seed": 0}
STATED = ["workloads=[vil-tiny-64-s1]", "orders=[none, ic]"]


def run(output):
    experiment.run("orders", "times", output, **HOW, stated=STATED)


def ended(monkeypatch, after, error):
    """The experiment, ended by an `error` after so many rows."""
    whole = member.run

    def broken(*given):
        for number, row in enumerate(whole(*given)):
            if number == after:
                raise error
            yield row

    monkeypatch.setattr(member, "run", broken)


@pytest.mark.parametrize("error", [ConfigError("no"), RuntimeError("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_rows_that_were_measured_before_an_end_are_kept(tmp_path, monkeypatch, capsys, error):
    output = tmp_path / "logs" / "times.csv"
    with monkeypatch.context() as patch:
        ended(patch, 1, error)
        with pytest.raises(type(error)):
            run(output)
    partial = output.with_name("times.csv.partial.csv")
    assert list(output.parent.iterdir()) == [partial]
    assert capsys.readouterr().err == f"{partial}: the 1 rows that were measured before the run ended\n"
    _, kept = _rows.read(partial, experiments.row_types())
    run(output)
    # A run that ends has all, and what was kept of the other is no more.
    assert list(output.parent.iterdir()) == [output]
    _, rows = _rows.read(output, experiments.row_types())
    assert len(rows) == 2 and list(kept[0]) == list(rows[0])
    assert [(row["reorder"], row["code"]) for row in kept] == [(row["reorder"], row["code"]) for row in rows[:1]]


def test_a_run_that_ends_before_its_first_row_leaves_nothing(tmp_path, monkeypatch, capsys):
    ended(monkeypatch, 0, RuntimeError("no"))
    with pytest.raises(RuntimeError):
        run(tmp_path / "times.csv")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""


def test_what_ended_a_run_is_told_where_its_rows_cannot_be_written(tmp_path, monkeypatch, capsys):
    ended(monkeypatch, 1, ConfigError("first"))
    monkeypatch.setattr(experiment, "write", lambda *_: (_ for _ in ()).throw(ArtifactError("second")))
    with pytest.raises(ConfigError, match="first"):
        run(tmp_path / "times.csv")
    assert "the 1 rows so far are lost: second" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"), rest_slow([(signal.SIGTERM, 143), (signal.SIGINT, 130)], 0), ids=["term", "int"]
)
def test_a_signal_keeps_the_rows_and_the_status_says_so(tmp_path, number, status):
    output = tmp_path / "times.csv"
    program = f"""
import argparse, time
from tilewright_study import cli
from tilewright_study.experiments import orders
from tilewright_study.stages import experiment
whole = orders.run
def slow(*given):
    yield next(whole(*given))
    print("waiting", flush=True)
    time.sleep(120)
orders.run = slow
how = {{**{HOW!r}, "stated": {STATED!r}}}
cli.script(argparse.ArgumentParser(), lambda: experiment.run("orders", "times", {str(output)!r}, **how))
"""
    source = str(Path(experiment.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert any(line == "waiting\n" for line in process.stdout)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, errors
    assert errors.splitlines()[-1].endswith("the 1 rows that were measured before the run ended")
    assert [path.name for path in tmp_path.iterdir()] == ["times.csv.partial.csv"]
    assert len(_rows.read(experiment.partial(output), experiments.row_types())[1]) == 1
