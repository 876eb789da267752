"""The benchmark of slices in diffusers' Wan: small, where diffusers is installed."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from helpers.files import loaded

SCRIPT = Path(__file__).parents[2] / "benchmarks/diffusers_wan.py"


@pytest.mark.slow
def test_passes_are_timed(monkeypatch, tmp_path):
    pytest.importorskip("diffusers", minversion="0.36")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", "--output", str(tmp_path / "x.csv")])
    loaded(SCRIPT).main()
    rows = pd.read_csv(tmp_path / "x.csv")
    of_step = [f"{kind}, a step of a pipeline" for kind in ("dense", *["kept lists"] * 3)]
    assert list(rows["attention"]) == ["dense", *["lists of each call", "kept lists"] * 3, *of_step]
    assert (rows["times_as_fast"][rows["attention"].str.startswith("dense")] == 1).all()
    lists = rows[~rows["attention"].str.startswith("dense")]
    assert (rows["ms"] > 0).all() and (lists["recall"][:6] > 0).all() and (lists["psnr"] > 20).all()
