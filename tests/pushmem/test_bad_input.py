"""What cannot be read or run: one clear line, and nothing is written."""

import subprocess
import sys

import pytest

from helpers import extras
from helpers.checkout import ROOT
from tilewright.core.errors import TilewrightError, install
from tilewright.pushmem import configuration_file, memories, rtl, solve, streams, templates
from tilewright_study.experiments.push import examples
from tilewright_study.stages import configure

PUB, DP = memories.member("pub"), memories.member("dp")
HEADER = "data_in,valid_in,data_out,valid_out\n"
IDLE = "[[0] [0]],0,[[0] [0]],0\n"
ASKED = dict(
    stream=None, component=None, memory=None, engine=None, layers=None, fix=None, monolithic=False, time_limit=None,
    system=None, solve=None, least=None, example=None, verify=None, write_stream=None, output=None,
)  # fmt: skip
DESIGN = "1 sort bitvec 8\n2 input 1 a\n3 state 1 s\n4 next 1 3 2\n"


def refused(folder, **asked):
    """The one line of an error; no file is new."""
    written = {} if asked.get("verify") else {"output": folder / "out.json"}
    asked = ASKED | written | {"write_stream": folder / "stream.csv"} | asked
    before = sorted(folder.iterdir())
    with pytest.raises(TilewrightError) as caught:
        configure.run(**asked)
    text = str(caught.value)
    assert "\n" not in text and sorted(folder.iterdir()) == before
    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_in,valid_in,data_out\n" + IDLE, "expected the columns data_in,valid_in,data_out,valid_out, found"),
        ("", "expected the columns data_in,valid_in,data_out,valid_out, found none"),
        (HEADER, "expected a row for each cycle, found none"),
        (HEADER + IDLE + "[[0 1] [0]],0,[[0] [0]],0\n", "row 3 (cycle 1), column data_in: expected 2 lists of 1 words"),
        (HEADER + "[[0] [0]],0,[[0]],0\n", "row 2 (cycle 0), column data_out: expected 2 lists of 1 words, found"),
        (HEADER + IDLE + IDLE + "[[65536] [0]],1,[[0] [0]],0\n", "row 4 (cycle 2), column data_in: expected words of"),
        (HEADER + "[[0] [0]],0,[[0] [65536]],2\n", "row 2 (cycle 0), column data_out: expected words of 16 bits"),
        (HEADER + "[[0] [0]],4,[[0] [0]],0\n", "row 2 (cycle 0), column valid_in: expected a mask of 2 ports, 0 to 3"),
        (HEADER + "[[0] [0]],0,[[0] [0]],7\n", "row 2 (cycle 0), column valid_out: expected a mask of 2 ports"),
        (HEADER + IDLE + "[[0] [0]],0,[[0", "row 3 (cycle 1): expected 4 columns, found 3: no valid_out"),
        (HEADER + IDLE + "[[0] [0]]", "row 3 (cycle 1): expected 4 columns, found 1: no valid_in, data_out, valid_out"),
    ],
)  # fmt: skip
def test_a_stream_that_cannot_be_read(text, message, tmp_path):
    (tmp_path / "s.csv").write_text(text)
    found = refused(tmp_path, stream=tmp_path / "s.csv")
    assert found.startswith(f"{tmp_path / 's.csv'}: {message}")


def test_words_that_come_out_before_they_came_in_are_named(tmp_path, capsys):
    stream = examples.stream("identity-8x8", PUB.PARAMETERS)
    stream.data_out[7, 0], stream.data_out[12, 0] = 40, 0
    streams.write(tmp_path / "s.csv", stream)
    with pytest.raises(SystemExit) as ended:
        configure.run(**ASKED | {"stream": tmp_path / "s.csv", "output": tmp_path / "why.json"})
    line = f"{tmp_path / 's.csv'}: infeasible: cycle 7: output 0 gives 40, which comes in at"
    assert ended.value.code == 2 and capsys.readouterr().out.startswith(line)


@pytest.mark.parametrize(
    ("text", "chosen", "message"),
    [
        (DESIGN, "config_.*", "expected inputs that match 'config_.*'"),
        (DESIGN + "5 output 9 o\n", "a", "line 5: unknown node 9"),
        (DESIGN + "5 uext 1 -1 0\n6 output 5 o\n", "a", "line 5: unknown node -1"),
        (DESIGN + "5 justice 1 3\n", "a", "line 5: expected a design without justice"),
        (DESIGN + "5 fair 3\n", "a", "line 5: expected a design without fair"),
    ],
)
def test_a_design_that_cannot_be_read(text, chosen, message, tmp_path):
    (tmp_path / "d.btor2").write_text(text)
    (tmp_path / "e.csv").write_text("o\n1\n")
    asked = {"system": tmp_path / "d.btor2", "solve": chosen, "example": tmp_path / "e.csv", "write_stream": None}
    assert message in refused(tmp_path, **asked)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"system": "d.btor2", "layers": 4}, "--layers: apply to tiles; leave them out with --system"),
        (
            {"system": "d.btor2", "engine": "bmc", "component": "agg", "memory": "pub", "fix": "c.json"},
            "--component, --memory, --engine: apply to tiles; leave them out",
        ),
        (
            {"system": "d.btor2", "stream": "identity-8x8", "monolithic": True},
            "--stream, --monolithic: apply to tiles; leave them out",
        ),
        (
            {"stream": "identity-8x8", "solve": "a", "example": "e.csv", "least": ["a"]},
            "--solve, --example, --least: apply to designs",
        ),
        (
            {"stream": "identity-8x8", "verify": "c.json", "engine": "fit", "fix": "c.json", "time_limit": 1.0},
            "--engine, --fix, --time-limit: apply to a search; leave them out with --verify",
        ),
        (
            {"system": "d.btor2", "verify": "c.json", "least": ["a"]},
            "--least: apply to a search; leave them out with --verify",
        ),
        ({"stream": "identity-8x8", "engine": "fit", "layers": 2, "monolithic": True}, "--layers, --monolithic: apply"),
        ({"stream": "identity-8x8", "verify": "c.json", "output": "o.json"}, "--output or --verify, found both"),
        ({"stream": "identity-8x8", "time_limit": -1.0}, "--time-limit: expected seconds, at least 0, found -1"),
        (
            {"stream": "identity-8x8", "time_limit": float("nan")},
            "--time-limit: expected seconds, at least 0, found nan",
        ),
        ({"stream": "identity-300x300"}, "expected at most 65536 words, which have 16 bits, found 90000"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(flags, message, tmp_path):
    assert message in refused(tmp_path, write_stream=None, **flags)


@pytest.mark.parametrize("flag", ["verify", "fix"])
def test_a_configuration_for_another_memory(flag, tmp_path):
    known = templates.configuration(examples.stream("identity-8x8", DP.PARAMETERS), DP)
    configuration_file.write(tmp_path / "dp.json", known)
    found = refused(tmp_path, stream="identity-8x8", **{flag: tmp_path / "dp.json"}, write_stream=None)
    assert found == "configuration: expected one of the memory pub, found one of dp"


def test_a_file_that_is_no_configuration(tmp_path):
    (tmp_path / "c.json").write_text("{}")
    assert "expected" in refused(tmp_path, stream="identity-8x8", verify=tmp_path / "c.json", write_stream=None)


def command_without(package, *words):
    """The command where a package is not installed."""
    script = ROOT / "workflow/scripts/configure.py"
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['configure.py', *sys.argv[1:]]; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["amaranth", "pyosys"])
def test_a_package_that_is_missing_is_named_and_rtl_is_not_run(package, tmp_path):
    done = command_without(package, "--stream", "identity-8x8", "--output", tmp_path / "c.json")
    assert done.returncode == 0 and f"rtl: not run: RTL needs {package}: {install()}" in done.stdout
    assert configuration_file.read(tmp_path / "c.json")[1]["verified"]["rtl"].startswith("not run: RTL needs")


@pytest.mark.parametrize(("package", "of"), [("amaranth", "RTL"), ("pyosys", "RTL"), ("bitwuzla", "bmc")])
def test_model_checking_without_a_package_says_what_to_install(package, of, tmp_path):
    if package != "amaranth":
        extras.need("amaranth")
    if package == "bitwuzla":
        extras.need("pyosys")
    done = command_without(package, "--stream", "identity-8x8", "--engine", "bmc", "--output", tmp_path / "c.json")
    assert done.returncode == 2 and f"{of} needs {package}: {install()}" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_without_a_compiler_rtl_is_not_run(tmp_path, monkeypatch, capsys):
    extras.need("amaranth", "pyosys")
    monkeypatch.setattr(rtl.shutil, "which", lambda name: None)
    solve.hardware_of.cache_clear()
    configure.run(**ASKED | {"stream": "identity-8x8", "output": tmp_path / "c.json"})
    found = capsys.readouterr().out
    assert "rtl: not run: RTL: expected the C++ compiler g++" in found and "ok" not in found
    assert "not run" in configuration_file.read(tmp_path / "c.json")[1]["verified"]["rtl"]
    solve.hardware_of.cache_clear()


def test_packages_of_the_extra_are_loaded_only_where_they_are_asked():
    code = "import sys; from tilewright_study.stages import configure; from tilewright.pushmem import bmc, rtl; "
    code += "print([name for name in ('amaranth', 'bitwuzla', 'pyosys') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
