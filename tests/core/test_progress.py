"""What long stages tell: lines in a log, a bar on a terminal, and never a word too many."""

import sys

import pytest

from helpers.terminal import Terminal, clock_of
from tilewright.core import progress


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, progress)


def test_a_log_gets_a_line_now_and_then(clock, capsys):
    for _ in progress.with_progress(range(6), "profile 64x1"):
        clock[0] += 6
    assert capsys.readouterr().err.splitlines() == [
        "profile 64x1: 2 of 6 done, about 24 s left",
        "profile 64x1: 4 of 6 done, about 12 s left",
    ]


def test_short_steps_are_quiet(clock, capsys):
    assert list(progress.with_progress(["a", "b"], "short")) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.with_progress(range(3), "tuning ic")) == [0, 1, 2]
    assert "tuning ic:" in terminal.getvalue() and "\n" not in terminal.getvalue()
