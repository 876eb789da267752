"""The benchmark of training, on a CPU and small."""

import importlib.util
from argparse import Namespace
from pathlib import Path

import pandas as pd
import pytest
import torch

from tilewright import graph

spec = importlib.util.spec_from_file_location("backward", Path(__file__).parents[2] / "benchmarks/backward.py")
backward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backward)

ARGUMENTS = ["--device", "cpu", "--patterns", "kept-30-256", "--seconds", "0.05"]


def test_every_contender_is_compared_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["backward.py", *ARGUMENTS, "--output", str(tmp_path / "x.csv")])
    backward.main()
    rows = pd.read_csv(tmp_path / "x.csv").set_index("contender")
    assert list(rows.index) == ["tilewright", "sdpa masked", "dense sdpa"] and set(rows["status"]) == {"ok"}
    assert (rows["both_us"] > rows["forward_us"]).all()
    assert (rows[["error", "error_dq", "error_dk", "error_dv"]] <= backward.TOLERANCE[torch.float32]).all(axis=None)


def test_a_wrong_contender_has_no_time_and_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["backward.py", *ARGUMENTS, "--output", str(tmp_path / "x.csv")])
    # Without the pattern.
    monkeypatch.setattr(backward, "masked", lambda *_: torch.nn.functional.scaled_dot_product_attention)
    with pytest.raises(SystemExit, match="wrong: kept-30-256 sdpa masked"):
        backward.main()
    row = pd.read_csv(tmp_path / "x.csv").set_index("contender").loc["sdpa masked"]
    assert row["status"] == "wrong" and pd.isna(row["both_us"])


def test_what_cannot_run_says_why():
    def refused():
        raise RuntimeError("no kernel\nfor this")

    found = backward.measured(refused, (*(torch.zeros(1, 1, 1, 1),) * 4, None), None, Namespace(device="cpu"))
    assert found == {"status": "unavailable: no kernel"}


def test_the_reference_is_that_of_autograd():
    ordered = backward.pattern_of("kept-30-64")
    q, k, v, grad = (torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=torch.from_numpy(ordered.to_dense()))
    expected = out, *torch.autograd.grad(out, leaves, grad)
    for x, y in zip(backward.oracle(ordered, q, k, v, grad), expected, strict=True):
        torch.testing.assert_close(x, y)
    assert isinstance(ordered, graph.Graph)
