"""The benchmark of joint attention runs, checks what it times, and stops at a wrong result."""

from pathlib import Path

import pandas as pd
import pytest

from helpers.files import loaded
from tilewright import slices

benchmark = loaded(Path(__file__).parents[2] / "benchmarks/slices_text.py")


def test_small_cases_are_checked_and_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["slices_text.py", "--tiny", "--output", str(tmp_path / "found.csv")])
    benchmark.main()
    rows = pd.read_csv(tmp_path / "found.csv")
    assert rows.groupby("case")["what"].count().to_dict() == {"tiny-first": 11, "tiny-last": 11}
    assert (rows["p50_us"] > 0).all() and rows["relative_error"].max() < 2e-3
    assert "tiny-last" in capsys.readouterr().out


def test_a_wrong_result_is_never_timed(monkeypatch):
    right = slices.attend
    monkeypatch.setattr(slices, "attend", lambda *given, **options: [2 * x for x in right(*given, **options)])
    monkeypatch.setattr("sys.argv", ["slices_text.py", "--tiny"])
    with pytest.raises(AssertionError, match="relative error"):
        benchmark.main()
