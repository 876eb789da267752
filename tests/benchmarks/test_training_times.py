"""The benchmark of training, on a CPU and small."""

from argparse import Namespace
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import plans
from helpers.files import loaded
from tilewright import graph

backward = loaded(Path(__file__).parents[2] / "benchmarks/backward.py")

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


def test_a_table_is_compared_too(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["backward.py", *ARGUMENTS, "--bias", "--output", str(tmp_path / "x.csv")])
    backward.main()
    rows = pd.read_csv(tmp_path / "x.csv").set_index("contender")
    assert set(rows["status"]) == {"ok"} and (rows["error_table"] <= backward.TOLERANCE[torch.float32]).all()


class Graphs:
    """CUDA graphs where there is no GPU: a replay makes the results anew, of new values or of those that were captured.

    Stands in for torch.cuda.
    """

    def __init__(self, call, sees, refuses=False):
        self.call, self.sees, self.refuses = call, sees, refuses
        self.Stream = self.current_stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
        self.set_stream = self.synchronize = lambda *_: None
        self.stream = lambda stream: nullcontext()
        self.CUDAGraph = lambda: SimpleNamespace(replay=self.replay)

    @contextmanager
    def graph(self, captured, stream):
        if self.refuses:
            raise RuntimeError("not while capturing")
        yield
        self.held = self.call.last

    def replay(self):
        if self.sees:
            self.held.copy_(self.call.now())


@pytest.mark.parametrize(
    "answer, given",
    [("right", {"sees": True}), ("wrong", {"sees": False}), ("not captured", {"sees": True, "refuses": True})],
)
def test_a_graph_that_does_not_see_new_values_is_told(monkeypatch, answer, given):
    table = torch.randn(2, 5)

    class Call:
        def now(self):
            return table.detach() * 2

        def __call__(self):
            self.last = self.now()
            return (self.last,)

    before, call = table.clone(), Call()
    monkeypatch.setattr(torch, "cuda", Graphs(call, **given))
    assert backward.replayed(call, table) == answer and torch.equal(table, before)


def test_packed_peers_train_on_the_tokens_of_their_layout(tmp_path, monkeypatch):
    """What is padded weighs nothing, and gradients come back in the order of packed tokens."""
    arguments = ["--device", "cpu", "--patterns", "--ragged", "3-20", "--seconds", "0.01"]
    monkeypatch.setattr("sys.argv", ["backward.py", *arguments, "--output", str(tmp_path / "x.csv")])
    backward.main()
    rows = pd.read_csv(tmp_path / "x.csv").set_index("contender")
    assert list(rows.index) == ["tilewright", *backward.PACKED]
    assert set(rows.index[rows["status"] == "ok"]) == {"tilewright", "sdpa_mask", "nested"}
    told = rows.loc[rows["status"] != "ok", "status"]
    assert all(status.startswith("unavailable: runs on an NVIDIA GPU only") for status in told)


def test_tokens_in_their_natural_order_are_put_there_and_back(monkeypatch):
    dense = plans.pattern(24, 24, 0.2) | np.eye(24, dtype=bool)
    ordered, pattern = plans.reordered(dense), graph.from_pattern(dense)
    monkeypatch.setattr(backward, "flexible", lambda graph, *_: backward.masked(graph, None, "cpu"))
    attend, put, get = backward.natural(ordered, pattern, "128", Namespace(device="cpu"))
    tokens = [torch.randn(1, 2, 24, 8, dtype=torch.float64) for _ in range(4)]
    expected, *_ = backward.oracle(ordered, *tokens)
    torch.testing.assert_close(get(attend(*put(*tokens[:3]))), expected)


@pytest.mark.parametrize("part", ["forward", "both"])
def test_gradients_that_go_wrong_where_they_are_timed_have_no_time(part, monkeypatch):
    wrong, right = [], backward.timing._wall_us

    def wall_us(call):
        if not wrong and (len(call.result) == 1) == (part == "forward"):
            wrong.append(call.call)
            call.call = lambda: tuple(x + 1 for x in wrong[0]())
        return right(call)

    monkeypatch.setattr(backward.timing, "_wall_us", wall_us)
    q, k, v, grad = (torch.randn(1, 1, 8, 4) for _ in range(4))
    expected = backward.oracle(None, q, k, v, grad)
    arguments = Namespace(device="cpu", effort={"min_reps": 3, "max_seconds": 0.01, "rse_target": 1.0})
    attend = torch.nn.functional.scaled_dot_product_attention
    found = backward.measured(lambda: attend, (q, k, v, grad, None), expected, arguments)
    assert wrong and found["status"] == "wrong" and "both_us" not in found
