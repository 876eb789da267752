import argparse
import sys
from pathlib import Path

import pytest

from helpers.files import run_script
from tilewright.core.errors import TilewrightError
from tilewright.study.cli import script

SCRIPTS = sorted((Path(__file__).parents[2] / "workflow/scripts").glob("*.py"))


def call(monkeypatch, run, *arguments):
    monkeypatch.setattr(sys, "argv", ["stage.py", *arguments])
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1)
    script(parser, run)


def test_arguments_arrive_by_keyword(monkeypatch):
    seen = {}
    call(monkeypatch, lambda **arguments: seen.update(arguments), "--rows", "7")
    assert seen == {"rows": 7}


def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    def run(rows):
        raise TilewrightError("expected rows\n  found none")

    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: expected rows found none\n"


def test_an_interrupt_is_exit_code_130(monkeypatch):
    def run(rows):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run)
    assert stopped.value.code == 130


def test_a_bug_is_not_hidden(monkeypatch):
    def run(rows):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, run)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_stage_documents_every_flag(path):
    done = run_script(path, "--help")
    assert done.returncode == 0, done.stderr
    # argparse shows a flag without help alone on its line, with nothing indented below it.
    lines = done.stdout.partition("options:")[2].splitlines()
    bare = [
        line
        for line, below in zip(lines, [*lines[1:], ""], strict=True)
        if line.strip().startswith("-") and "  " not in line.strip() and not below.startswith(" " * 10)
    ]
    assert bare == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_stage_refuses_an_unknown_flag_without_a_trace(path):
    done = run_script(path, "--no-such-flag")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{path.name}: error: ")
