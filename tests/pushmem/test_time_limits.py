"""A time limit holds, whatever is slow: building, a solver, another tool, or a process that is slow to end."""

import json
import os
import pickle
import subprocess
import sys
import time

import pytest

from helpers import extras
from helpers.systems import Builder
from tilewright import __main__ as cli
from tilewright.core import deadline
from tilewright.core.errors import SolverError, UnknownNameError
from tilewright.pushmem import memories, solve
from tilewright.pushmem.configure import design, query, unroll
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.movers import least
from tilewright_study.experiments.push import examples
from tilewright_study.stages import configure

PUB, LIMIT_S = memories.member("pub"), 0.2


def stuck(*_, **__):
    time.sleep(60)


@pytest.fixture(autouse=True)
def within_the_limit(monkeypatch):
    """All of a test's questions together take seconds, not a minute."""
    monkeypatch.setattr(deadline, "GRACE_S", 0.1)
    begin = time.perf_counter()
    yield
    assert time.perf_counter() - begin < 50


def stream():
    return examples.stream("identity-8x8", PUB.PARAMETERS)


def test_the_last_answer_in_time_counts():
    def answers():
        yield 1
        yield 2
        stuck()

    assert deadline.last(answers, LIMIT_S) == 2 and deadline.last(stuck, LIMIT_S) is None
    assert deadline.last(lambda: iter((1, 2)), 60) == deadline.last(lambda: iter((1, 2)), None) == 2
    # A limit within a limit is that one.
    assert deadline.last(lambda: iter([deadline.last(answers, 60)]), LIMIT_S) is None


def test_what_a_search_started_ends_with_it(tmp_path):
    def answers():
        started = subprocess.Popen(["sleep", "60"])
        (tmp_path / "number").write_text(str(started.pid))
        try:
            yield started.wait()
        finally:
            (tmp_path / "tidied").touch()

    assert deadline.last(answers, 1.0) is None and (tmp_path / "tidied").exists()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int((tmp_path / "number").read_text()), 0)
            time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it, on Linux")
def test_a_search_ends_with_its_parent(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, time\nfrom tilewright.core import deadline\n"
        "deadline.last(lambda: iter([print(os.getpid(), flush=True), time.sleep(60)]), 60)\n"
    )
    with subprocess.Popen([sys.executable, tmp_path / "own.py"], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(child, 0)
            time.sleep(0.05)


def test_children_of_another_process_are_no_errors(monkeypatch):
    monkeypatch.setattr(deadline, "_ending", {1})
    assert deadline.last(lambda: iter("a"), 60) == "a" and 1 not in deadline._ending


def test_nobody_waits_for_a_process_that_is_slow_to_end(monkeypatch):
    # A killed process gives back its memory first, which took minutes on a busy machine.
    monkeypatch.setattr(deadline.os, "killpg", lambda *_: None)
    begin = time.perf_counter()
    assert deadline.last(lambda: iter([time.sleep(5)]), LIMIT_S) is None
    assert time.perf_counter() - begin < 4


def test_errors_pass_a_limit():
    error = UnknownNameError("device", "x", ["y"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "unknown device 'x'; known: y"

    def refused():
        raise error
        yield

    with pytest.raises(UnknownNameError, match="unknown device 'x'"):
        deadline.last(refused, 60)
    with pytest.raises(SolverError, match="ended without an answer"):
        deadline.last(lambda: iter([os._exit(3)]), 60)


def test_algebra_model_checking_and_the_rtl_keep_to_the_limit(monkeypatch):
    monkeypatch.setattr(solve, "_by_hardware", stuck)
    found = solve.solve(stream(), PUB, engine="fit", limit_s=4)
    assert found.verdict == "solved" and found.verified["rtl"] == "not run: the time limit is over"
    extras.need("amaranth", "bitwuzla")
    # The tool that writes the system of a tile knows no limit.
    monkeypatch.setattr("tilewright.pushmem.bmc._system", lambda *_: stuck())
    for monolithic in (True, False):
        found = solve.solve(stream(), PUB, engine="bmc", monolithic=monolithic, limit_s=LIMIT_S)
        assert found.verdict == "unknown"
    with pytest.raises(SolverError, match="with this configuration is unknown"):
        known = solve.solve(stream(), PUB, engine="fit", hardware=False).configuration
        solve.asserted(known, stream(), PUB, limit_s=LIMIT_S)
    monkeypatch.setattr(solve, "_fitted", stuck)
    late = solve.solve(stream(), PUB, limit_s=LIMIT_S)
    assert (late.verdict, late.cause["text"]) == ("unknown", "the time limit ended the search")


def test_a_question_whose_building_is_long_keeps_to_the_limit(monkeypatch):
    b = Builder("own")
    b.output("value", b.parameter("start", 8))
    monkeypatch.setattr(unroll.Unrolled, "__init__", stuck)
    assert query.solve(b.system, Example(1, {}, {"value": [7]}), limit_s=LIMIT_S).verdict == query.GAVE_UP


def test_designs_keep_to_the_limit_of_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(design, "read", lambda *_: subprocess.run(["sleep", "60"], check=True))
    values = dict.fromkeys(("stream", "component", "memory", "engine", "layers", "fix", "monolithic", "write_stream"))
    values |= {"system": "own.v", "solve": ".*", "least": None, "time_limit": LIMIT_S, "example": "own.csv"}
    for more in ({}, {"for_all": "x", "cycles": 3, "example": None}):
        with pytest.raises(SystemExit) as ended:
            configure.run(**values | more, verify=None, output=tmp_path / "out.json")
        assert ended.value.code == 3 and capsys.readouterr().out.startswith("own.v: unknown")
        assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "unknown"
    with pytest.raises(SystemExit):
        configure.run(**values | more, verify=tmp_path / "out.json", output=None)


def test_descriptors_keep_to_the_limit_and_to_the_least_so_far(monkeypatch, capsys):
    monkeypatch.setattr(least, "_rounds", lambda *_: map(stuck, "x"))
    options = ["descriptors", "--sizes", "2,2,4", "--strides", "8,0,1"]
    assert cli.main([*options, "--time-limit", "2"]) == 0
    assert "answer     2 descriptors of 16, fewer may exist" in capsys.readouterr().out
    monkeypatch.setattr(least, "_nest", stuck)
    assert cli.main([*options, "--time-limit", str(LIMIT_S)]) == 1
    assert "unknown: the time limit ended the search" in capsys.readouterr().out
