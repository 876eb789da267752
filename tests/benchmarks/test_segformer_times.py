"""The benchmark of SegFormer, on a CPU and small."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from helpers.files import loaded
from tilewright import devices
from tilewright.networks import map_operators

SCRIPT = Path(__file__).parents[2] / "benchmarks/segformer.py"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the benchmark with arguments; what it writes is `x.csv`."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(tmp_path / "x.csv")])
        loaded(SCRIPT).main()
        return pd.read_csv(tmp_path / "x.csv")

    return run


def test_every_case_is_compared_and_timed(bench, tmp_path, capsys):
    rows = bench("--tiny")
    kernels = pd.read_csv(tmp_path / "x_kernels.csv")
    assert set(rows["status"]) == {"ok"} and set(rows["part"]) == {"decoder", "network"}
    assert set(rows["case"]) >= {"published", "folded", "kernels"} and (rows["call_us"] > 0).all()
    assert (rows["error"] <= rows["tolerance"]).all() and "published/folded" in capsys.readouterr().out
    assert set(kernels["operator"]) == {*map_operators.KERNELS}


def test_what_there_is_no_time_for_is_not_begun(bench):
    with pytest.raises(SystemExit, match="no time left"):
        bench("--tiny", "--seconds", "-1")


def test_cases_are_taken_in_the_order_that_is_stated(bench):
    rows = bench("--tiny", "--cases", "network/folded,decoder/published")
    assert list(zip(rows["part"], rows["case"], strict=True)) == [("network", "folded"), ("decoder", "published")]


@pytest.mark.parametrize(("device", "case"), [("cuda", "network/x"), ("cpu", "network/kernels")])
def test_unknown_cases_are_named(bench, capsys, device, case):
    with pytest.raises(SystemExit, match="2"):
        bench("--device", device, "--cases", case)
    assert f"unknown '{case}'; known: decoder/published" in capsys.readouterr().err


def test_a_cpu_has_no_kernels_of_its_own(bench):
    rows = bench("--device", "cpu", "--variants", "b0", "--sizes", "64", "--no-compile")
    assert set(rows["status"]) == {"ok"} and {"published", "folded"} <= set(rows["case"]) <= {
        "published", "folded", "transformers"
    }  # fmt: skip
    assert set(rows["dtype"]) == {"float32"} and set(rows["device"]) == {devices.describe("cpu")["name"]}
