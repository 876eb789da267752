"""The command line: what each subcommand does with good input, and one line with exit status 2 for bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import tilewright as tw
from helpers.gpu import hide_gpu
from tilewright import __main__ as command
from tilewright import commands, graph
from tilewright.attention import plan
from tilewright.commands import _drawing, _inputs, bench, doctor
from tilewright.core import compiled
from tilewright.nn import patterns

SMALL = ["--heads", "1", "--head-dim", "8", "--solver", "greedy"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "w.plan"
    made = tw.plan(patterns.graph("window-3-g1", (9, 11), 1), heads=1, head_dim=8, solver="greedy", tiles=("16x1",))
    made.save(path)
    return path


def fails(capsys, *arguments):
    """The one line that a command with bad input prints; its exit status is 2."""
    assert command.main([str(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_help_of_every_command_is_light():
    code = "import sys; from tilewright.__main__ import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'triton', 'scipy', 'matplotlib', 'highspy'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(tw.__file__).parents[1])}
    for name in ((), *((name,) for name in commands.NAMES)):
        done = subprocess.run(
            [sys.executable, "-c", code, *name, "--help"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        text = done.stdout.replace("\n", " ")
        assert all(each in text for each in (name or commands.NAMES))


def test_no_command_shows_the_help_with_examples(capsys):
    assert command.main([]) == 2
    assert "tilewright bench window.plan" in capsys.readouterr().err


@pytest.mark.parametrize("name", commands.NAMES)
def test_an_unknown_option_is_exit_status_2(capsys, name):
    with pytest.raises(SystemExit) as stopped:
        needed = {"plan": ["-o", "x"], "tune-slices": ["-o", "x"], "stream": ["--source", "x", "--network", "x"]}
        command.main([name, "--frobnicate", "x", "x", *needed.get(name, [])])
    assert stopped.value.code == 2
    assert "--frobnicate" in capsys.readouterr().err


# plan


def test_a_named_pattern_is_planned_and_saved(tmp_path, capsys):
    path = tmp_path / "w.plan"
    assert command.main(["plan", "window-5-g2", "--grid", "8x9", *SMALL, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    found = tw.load(path)
    assert out == f"{found.summary()}\nsaved      {path}\n"
    assert (
        _drawing.natural(found.graph).to_dense().tolist()
        == patterns.graph("window-5-g2", (8, 9), 2).to_dense().tolist()
    )


@pytest.mark.parametrize(("most", "warns"), [(-1.0, True), (float("inf"), False)])
def test_a_plan_that_is_made_on_a_busy_cpu_warns(tmp_path, capsys, monkeypatch, most, warns):
    monkeypatch.setattr("tilewright.commands.plan.MOST_SPREAD", most)
    assert command.main(["plan", "window-5", "--grid", "8x9", *SMALL, "-o", str(tmp_path / "w.plan")]) == 0
    assert ("warning: the CPU seems busy" in capsys.readouterr().err) == warns


def mask():
    return np.random.default_rng(0).random((40, 50)) < 0.2


WRITERS = {
    "npy": lambda path: np.save(path, mask()),
    "npz": lambda path: sp.save_npz(path, sp.csr_array(mask())),
    "pt": lambda path: torch.save(torch.from_numpy(mask()), path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_mask_file_is_planned(tmp_path, kind):
    path = tmp_path / f"mask.{kind}"
    WRITERS[kind](path)
    out = tmp_path / "m.plan"
    assert command.main(["plan", str(path), *SMALL, "--dtype", "bfloat16", "--reorder", "none", "-o", str(out)]) == 0
    found = tw.load(out)
    assert _drawing.natural(found.graph).to_dense().tolist() == mask().tolist()
    assert (found.dtype, found.reorder["order"], found.schedule.solver) == (torch.bfloat16, "none", "greedy")


def test_a_workload_tells_its_heads(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(plan, "plan", lambda found, **options: asked.update(options, shape=found.shape) or Saved())
    assert command.main(["plan", "vil-tiny-64-s1", "--tiles", "64x1", "-o", str(tmp_path / "v.plan")]) == 0
    assert (asked["heads"], asked["head_dim"], asked["tiles"]) == (1, 48, ["64x1"])


class Saved:
    profiles: ClassVar = {}

    def save(self, path):
        pass

    def summary(self):
        return ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["windw-5"],
            r"unknown pattern 'windw-5'; known: window-<side>.*such as vil-.*ending in .npz.*; did you mean window-5",
        ),
        (["window-5"], "window-5: expected a grid of rows x columns, e.g. --grid 64x64, found none"),
        (["window-5", "--grid", "64"], "--grid: expected rows x columns such as 64x64, found '64'"),
        (["vil-tiny-64-s1", "--grid", "4x4"], "--grid: only a named pattern takes a grid, found the workload"),
        (["m.npy", "--grid", "4x4"], "--grid: only a named pattern takes a grid, found the file m.npy"),
        (["none.npy"], "none.npy: no such file; expected a mask"),
        (["swin-4", "--grid", "6x6"], "whole windows of 4, found 6 x 6"),
        (
            ["window-5", "--grid", "6x6"],
            "--heads: expected a positive number, found none; window-5 does not state it",
        ),
        (["window-5", "--grid", "6x6", "--heads", "2"], "--head-dim: expected a positive number"),
        (["window-5", "--grid", "6x6", *SMALL[:4], "--solver", "magic"], "unknown solver 'magic'"),
        (["window-5", "--grid", "6x6", *SMALL, "--tiles", "7y7"], "7y7"),
        (["window-5", "--grid", "6x6", *SMALL, "--device", "tpu"], "found 'tpu'; known: cpu, cuda"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_bad_patterns_are_one_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    assert re.search(line, fails(capsys, "plan", *arguments, "--output", "x.plan"))
    assert not list(tmp_path.iterdir())


# show


def test_a_plan_is_shown_and_drawn(tmp_path, capsys, plan_file):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        assert command.main(["show", str(plan_file), "--figure", str(path)]) == 0
    assert tw.load(plan_file).summary() in capsys.readouterr().out
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = paths[0].read_text()
    assert text.startswith("<?xml") and len(text) > 5000


def test_a_pattern_is_shown(capsys):
    assert command.main(["show", "window-3-g1", "--grid", "9x11", "--tile", "16x1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    dense = patterns.graph("window-3-g1", (9, 11), 1).to_dense()
    assert lines[0] == f"pattern    100 × 100, {dense.sum()} pairs, density {dense.mean():.4f}"
    assert lines[1].startswith("rows       ") and "5 to 100 keys" in lines[1]
    assert [line.split(",")[0] for line in lines[-2:]] == ["as the model has it", "order ic"]


def test_a_graph_file_in_an_order_is_shown_as_it_is(tmp_path, capsys):
    dense = mask()
    found = graph.from_pattern(dense).reordered(*(np.random.default_rng(1).permutation(n) for n in dense.shape))
    graph.save(tmp_path / "g.npz", found)
    assert command.main(["show", str(tmp_path / "g.npz"), "--tile", "16x1"]) == 0
    assert "as the file has it, tile 16x1" in capsys.readouterr().out


def test_pictures_show_what_is_allowed_and_what_is_executed(plan_file, monkeypatch):
    made = tw.load(plan_file)
    natural, ordered = _drawing.of_plan(made)
    colours = {name: (0.0, 1.0, 0.0) for name, *_ in ordered.parts}
    shown = _drawing.picture(ordered, colours)
    dense = made.graph.to_dense()
    white = (shown == 1).all(-1)
    green = (shown == (0, 1, 0)).all(-1)
    assert np.array_equal(~white & ~green, dense)
    assert green.any() and white.any()
    # With the padding of the last run of keys, at least what is drawn.
    assert (~white).mean() <= ordered.work
    assert np.array_equal((_drawing.picture(natural, {}) != 1).any(-1), _drawing.natural(made.graph).to_dense())
    # Pixels are means of what they stand for.
    monkeypatch.setattr(_drawing, "PIXELS", 10)
    small = _drawing.picture(ordered, colours)
    assert small.shape == (10, 10, 3)
    np.testing.assert_allclose(small, shown.reshape(10, 10, 10, 10, 3).mean((1, 3)), atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["none.plan"], "none.plan: no such file; expected a plan that `tilewright plan` wrote"),
        (["text.plan"], "text.plan: expected a plan file, found a damaged archive"),
        (["window-3", "--grid", "4x4", "--figure", "x.gif"], "x.gif: expected a name ending in .svg, .png, .pdf"),
        (["window-3", "--grid", "9x9", "--reorder", "alphabet"], "unknown order 'alphabet'"),
        (["window-3", "--grid", "9x9", "--tile", "0x0"], "0x0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_shown_is_one_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    Path("text.plan").write_text("plan")
    assert line in fails(capsys, "show", *arguments)


def test_a_plan_is_known_by_what_it_holds(tmp_path, plan_file):
    renamed = tmp_path / "renamed"
    renamed.write_bytes(plan_file.read_bytes())
    assert _inputs.is_plan(renamed) and not _inputs.is_plan("window-3")


# bench


def test_a_plan_is_checked_and_timed_beside_its_peers(capsys, plan_file):
    arguments = ["bench", str(plan_file), "--without", "flex", "--seconds", "0.01", "--rse", "1"]
    assert command.main(arguments) == 0
    _, tensors, header, *rows = capsys.readouterr().out.splitlines()
    assert "batch 1, 1 heads × 8, float32" in tensors and "× plan" in header
    assert [
        name in row
        for name, row in zip(("tilewright", "tilewright", "SDPA with mask", "SDPA, all pairs"), rows, strict=True)
    ]
    assert " 1.00 " in rows[0] and all("–" not in row for row in rows)


def test_the_ways_to_call_a_plan_are_checked_and_timed(capsys, monkeypatch, plan_file):
    options = ["--without", "flex", "sdpa_dense", "sdpa_mask", "--ways", "--seconds", "0.01", "--rse", "1"]
    assert command.main(["bench", str(plan_file), *options]) == 0
    header, eager, compiled, fastest = capsys.readouterr().out.splitlines()[-4:]
    assert "way to call" in header and eager.split()[0] == "eager" and "torch.compile" in compiled
    assert fastest.split(maxsplit=1)[0] == "fastest" and fastest.split(maxsplit=1)[1] in ("eager", "torch.compile")
    monkeypatch.setattr(torch, "compile", lambda call, **_: lambda q, k, v: call(q, k, v) + 1)
    assert "torch.compile: relative error" in fails(capsys, "bench", plan_file, *options)


@pytest.mark.slow
def test_flex_attention_is_timed_in_both_orders(capsys, plan_file):
    arguments = ["bench", str(plan_file), "--forms", "128", "--seconds", "0.01", "--rse", "1"]
    assert command.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err.count("flex 128: first call") == 2 and "FlexAttention" in out.splitlines()[-1]


def test_a_wrong_result_has_no_time(capsys, monkeypatch, plan_file):
    from tilewright.torch_attention import Ready, masked

    monkeypatch.setattr(masked, "prepare", lambda graph, **_: Ready(lambda q, k, v: torch.zeros_like(q), 0, 1))
    arguments = ["bench", str(plan_file), "--without", "flex", "sdpa_dense", "--seconds", "0.01", "--rse", "1"]
    assert command.main(arguments) == 1
    *_, row, reason = capsys.readouterr().out.splitlines()
    assert "SDPA with mask" in row and "–" in row
    assert reason.startswith("SDPA with mask: failed: relative error")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--forms", "3"], "unknown form of FlexAttention '3'; known: 128, 64"),
    ],
)
def test_what_cannot_be_timed_is_one_line(capsys, plan_file, options, line):
    assert line in fails(capsys, "bench", plan_file, *options)


def test_a_plan_with_a_bias_is_not_timed_beside_peers_without_one(capsys, tmp_path, plan_file):
    made = tw.load(plan_file)
    made.with_bias(torch.zeros(1, *made.graph.shape)).save(tmp_path / "b.plan")
    assert "expected a plan without bias" in fails(capsys, "bench", tmp_path / "b.plan")


def test_dense_attention_of_many_tokens_is_skipped(capsys, monkeypatch, plan_file):
    monkeypatch.setattr(bench, "MOST_TOKENS", 50)
    assert command.main(["bench", str(plan_file), "--without", "flex", "--seconds", "0.01", "--rse", "1"]) == 0
    assert "SDPA with mask: skipped: 100 keys; dense attention is run up to 50" in capsys.readouterr().out


# doctor


def test_doctor_says_what_a_call_costs(capsys):
    command.main(["doctor"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "call"]
    assert re.search(r"64 tokens, 1 head, by \S+: \d+ µs", line)


def lines_of(capsys):
    status = command.main(["doctor"])
    found = {}
    for line in capsys.readouterr().out.splitlines():
        state, name, *text = line.split(maxsplit=2)
        assert state in ("ok", "note", "slow", "bad"), line
        found.setdefault(name, []).append((state, " ".join(text)))
    return status, found


def test_the_doctor_says_what_is_here(capsys, monkeypatch, tmp_path):
    hide_gpu(monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    (tmp_path / "a.plan").write_bytes(b"x" * 2_000_000)
    compiled.load.cache_clear()
    status, found = lines_of(capsys)
    assert status == 0
    assert {"tilewright", "python", "cpu", "gpu", "C++", "compiled", "cache", "timm", "transformers"} <= set(found)
    assert found["gpu"][0][0] == "note"
    assert found["cache"] == [("ok", f"{tmp_path}: 1 plans, 2.0 MB in 1 files")]
    assert found["compiled"][0][0] == "slow" and "tilewright compile" in found["compiled"][0][1]


def test_the_doctor_names_versions_that_do_not_fit(capsys, monkeypatch):
    hide_gpu(monkeypatch)
    installed = doctor._installed
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["numpy>=2.0", "torch<2.14", "absent>=1", "x; extra=='y'"]
    )
    versions = {"tilewright": "0", "numpy": "2.4.1", "torch": "2.99.0+cpu", "absent": None}
    monkeypatch.setattr(doctor, "_installed", lambda name: versions.get(name, installed(name)))
    status, found = lines_of(capsys)
    assert status == 1
    assert found["torch"] == [("bad", "2.99.0+cpu, expected <2.14: pip install 'torch<2.14'")]
    assert found["absent"][0][0] == "bad" and found["numpy"] == [("ok", "2.4.1")]


def test_the_doctor_says_what_is_slow(capsys, monkeypatch, tmp_path):
    hide_gpu(monkeypatch)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: range(torch.get_num_threads() + 3))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    _, found = lines_of(capsys)
    for name in ("cpu", "cache"):
        assert found[name][0][0] == "slow", name


def test_the_doctor_knows_gpus(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_called", lambda: ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    described = {"name": "GPU", "capability": "7.5", "driver": "600.1", "multiprocessors": 8}
    monkeypatch.setattr(doctor, "_release", lambda version: tuple(map(int, version.split("+")[0].split(".")[:2])))
    from tilewright import devices

    monkeypatch.setattr(devices, "describe", lambda kind: described)
    _, found = lines_of(capsys)
    assert [state for state, _ in found["gpu"]] == ["ok", "slow"]
    assert found["calibration"][0][0] == "slow"
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration/bfloat16-64-64-0123.json").write_text(json.dumps({}))
    _, found = lines_of(capsys)
    assert found["calibration"] == [("ok", "measured here for bfloat16-64-64 (type-head dim-rows)")]
    from tilewright.attention.cuda import calibration

    for name, state in {"GPU": "ok", "Its sibling": "note"}.items():
        monkeypatch.setattr(calibration, "shipped", lambda name=name: [SimpleNamespace(name=name)])
        _, found = lines_of(capsys)
        assert [each for each, _ in found["calibration"]] == ["ok", state] and name in found["calibration"][1][1]
