"""The benchmark of LTX-2.5's video decoder: small, where diffusers is installed; the figure of recorded rows."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from helpers.files import loaded

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/ltx_decoder.py"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the benchmark with arguments; where its output lies."""

    def run(output, *arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(tmp_path / output)])
        loaded(SCRIPT).main()
        return tmp_path / output

    return run


@pytest.mark.slow
def test_each_form_is_checked_and_timed(bench):
    pytest.importorskip("diffusers", minversion="0.42")
    rows = pd.read_csv(bench("x.csv", "--tiny")).set_index("form")
    assert (rows.loc[["fused", "plain", "flex"], "decode_ms"] > 0).all()


def test_recorded_rows_are_drawn(bench):
    assert bench("x.png", "--draw", str(ROOT / "expected/benchmarks/h200/ltx_decoder.csv")).stat().st_size > 1000


def test_kernels_have_a_kind():
    kind = loaded(SCRIPT).kind
    names = "tilewright_neighborhood", "tilewright_rotary", "nvjet_sm90_tst", "triton_tem_fused_flex_attention_0", "vec"
    assert [*map(kind, names)] == ["attention", "rotary", "products", "attention", "pointwise"]
