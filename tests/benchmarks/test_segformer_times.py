"""The benchmark of SegFormer, on a CPU and small."""

import subprocess
import sys
from pathlib import Path

import pandas as pd

from tilewright import targets
from tilewright.networks import _maps

ROOT = Path(__file__).parents[2]


def test_every_case_is_compared_and_timed(tmp_path):
    command = [sys.executable, "benchmarks/segformer.py", "--tiny", "--output", tmp_path / "x.csv"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows, kernels = pd.read_csv(tmp_path / "x.csv"), pd.read_csv(tmp_path / "x_kernels.csv")
    assert set(rows["status"]) == {"ok"} and set(rows["part"]) == {"decoder", "network"}
    assert set(rows["case"]) >= {"published", "folded", "kernels"} and (rows["call_us"] > 0).all()
    assert (rows["error"] <= rows["tolerance"]).all() and "published/folded" in printed
    assert set(kernels["operator"]) == {*_maps.KERNELS}


def test_what_there_is_no_time_for_is_not_begun(tmp_path):
    command = [sys.executable, "benchmarks/segformer.py", "--tiny", "--seconds", "-1", "--output", tmp_path / "x.csv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no time left" in done.stderr


def test_cases_are_taken_in_the_order_that_is_stated(tmp_path):
    command = [sys.executable, "benchmarks/segformer.py", "--tiny", "--output", tmp_path / "x.csv", "--cases"]
    subprocess.run([*command, "network/folded,decoder/published"], cwd=ROOT, check=True, capture_output=True)
    rows = pd.read_csv(tmp_path / "x.csv")
    assert list(zip(rows["part"], rows["case"], strict=True)) == [("network", "folded"), ("decoder", "published")]
    done = subprocess.run([*command, "network/x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown 'network/x'; known: decoder/published" in done.stderr


def test_a_cpu_has_no_kernels_of_its_own(tmp_path):
    command = [sys.executable, "benchmarks/segformer.py", "--device", "cpu", "--variants", "b0", "--sizes", "64"]
    subprocess.run(
        [*command, "--no-compile", "--output", tmp_path / "x.csv"], cwd=ROOT, check=True, capture_output=True
    )
    rows = pd.read_csv(tmp_path / "x.csv")
    assert set(rows["status"]) == {"ok"} and {"published", "folded"} <= set(rows["case"]) <= {
        "published", "folded", "transformers"
    }  # fmt: skip
    assert set(rows["dtype"]) == {"float32"} and set(rows["device"]) == {targets.describe("cpu")["name"]}
    done = subprocess.run([*command, "--cases", "network/kernels"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown 'network/kernels'; known: decoder/published" in done.stderr
