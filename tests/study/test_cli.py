import argparse
import os
import sys
from pathlib import Path

import pytest

from helpers.files import run_script
from tilewright.core import flags
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright_study import cli
from tilewright_study.cli import script

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


# What each type of an argument refuses, before any work begins.
WRONG = {
    flags.count: ("0", "-1", "2.0", "x", "", "nan", "1" * 30),
    flags.whole: ("-1", "0.5", "inf"),
    flags.seed: ("-1", str(2**31), "1e3"),
    flags.pixels: ("0", "10000000"),
    flags.threads: ("0", "-1", "999999"),
    flags.positive: ("0", "-1", "nan", "x", "inf", "1e400"),
    flags.minutes: ("-1", "nan", "inf", ""),
    flags.seconds: ("0", "-1", "nan", "inf", "-inf", ""),
    flags.share: ("0", "1.5", "nan"),
    flags.gap: ("-1", "nan", "inf"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_number_that_makes_no_sense_is_refused_in_one_line(kind):
    for text in WRONG[kind]:
        with pytest.raises(argparse.ArgumentTypeError, match=r"^expected .*, found '.*'$"):
            kind(text)


def test_numbers_that_make_sense_are_taken():
    assert (flags.count("7"), flags.whole("0"), flags.seed("0"), flags.threads("1")) == (7, 0, 0, 1)
    assert (flags.seconds("0.5"), flags.share("1"), flags.gap("0"), flags.positive("1e-6")) == (0.5, 1.0, 0.0, 1e-6)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for kind in (flags.output, flags.folder):
        assert kind(str(tmp_path / "new" / "deep")) == str(tmp_path / "new" / "deep")
        for text in ("", str(tmp_path / "file" / "below"), "x" * 300, "/x" * 3000):
            with pytest.raises(argparse.ArgumentTypeError, match=r"^expected .*, found "):
                kind(text)
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file to write, found a folder"):
        flags.output(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file to write, found a device or a pipe"):
        flags.output(str(tmp_path / "pipe"))


# Options that name what is written.
WRITTEN = ("--output", "--outputs", "--log", "--scores", "--losses", "--predictor", "--write-stream")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_argument_is_checked_as_it_is_read(path, monkeypatch):
    parsers = []
    monkeypatch.setattr(cli, "script", lambda parser, run: parsers.append(parser))
    run_script(path)
    for action in parsers[0]._actions:
        assert action.type not in (int, float), action.option_strings
        if set(action.option_strings) & set(WRITTEN):
            assert action.type in (flags.output, flags.folder), action.option_strings


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 TB")])
def test_a_size_that_no_memory_holds_is_one_line(monkeypatch, capsys, error):
    def run(rows):
        raise error

    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, run)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: expected a size that fits the memory")


def test_settings_that_are_nested_too_deep_are_refused():
    with pytest.raises(ConfigError, match="nested"):
        cli.settings(["a=" + "[" * 100_000])


# A script, its arguments before a file that is damaged or not there, and those after it.
READING = {
    "quote.py": ((), ()),
    "table.py": (("--table", "fill", "--inputs"), ("--outputs", "out.csv")),
    "draw.py": (("--figure", "fill", "--inputs"), ("--outputs", "out.svg")),
    "make_report.py": (("--tables",), ("--output", "out.html")),
    "aggregate_results.py": (("--input",), ("--output", "out")),
    "extract_blocks.py": (("--input",), ("--output", "out.npz")),
    "configure.py": (("--system",), ("--solve", "x", "--example", "y", "--output", "out.json")),
}


@pytest.mark.parametrize("name", READING)
def test_a_file_that_cannot_be_read_is_one_line(name, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\x95\xff\x00")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    before, after = READING[name]
    # A document may have no table.
    deep = [] if name == "quote.py" else [tmp_path / "deep.json"]
    for file in (damaged, *deep, tmp_path / "missing", "x" * 300):
        done = run_script(SCRIPTS[0].with_name(name), *before, file, *after, folder=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, (file, done.stderr)
        assert done.stderr.startswith("error: ") and len(done.stderr) < 2020
    assert not [*tmp_path.glob("out*")]


def test_an_app_of_endless_size_is_one_line(tmp_path):
    done = run_script(SCRIPTS[0].with_name("push_app.py"), "--app", f"gaussian-{'9' * 5000}", "--output", tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown app")


def test_an_unknown_solver_is_one_line(tmp_path):
    stated = ("--blocks", "a", "--profile", "b", "--solver", "other", "--output", tmp_path / "out.json")
    done = run_script(SCRIPTS[0].with_name("solve_ilp.py"), *stated)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown solver 'other'; known: ")
