"""Timing on a GPU, and what of it needs none. Timing on a CPU is tested in `test_timing`."""

import numpy as np
import pytest
import torch

from helpers import plans
from tilewright import graph
from tilewright.core import timing
from tilewright_study.experiments.attention.run import Tokens, run_baselines
from tilewright_study.measure.effort import Effort

EFFORT = {"min_reps": 5, "max_seconds": 0.2, "rse_target": 0.05}

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize(("us", "calls"), [(0.1, 256), (3.0, 100), (299.0, 2), (10_000.0, 1)])
def test_a_batch_is_long_enough_for_events_to_tell(us, calls):
    assert timing._calls(us) == calls


def test_the_spread_is_that_of_the_samples():
    samples = iter([4.0, 6.0, 5.0, 5.0, 5.0])
    found = timing._repeated(lambda: next(samples), 5, 10.0, 1.0, "graph")
    assert (found.p50_us, found.repetitions, found.method) == (5.0, 5, "graph")
    assert found.rse == pytest.approx(np.std([4, 6, 5, 5, 5], ddof=1) / 5 / 5**0.5)


@on_gpu
def test_what_can_be_captured_is_timed_by_replay():
    x, y = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 24, device="cuda")
    small, large = (timing.time_gpu(lambda tensor=tensor: tensor.add_(1), **EFFORT) for tensor in (x, y))
    assert small.method == large.method == "graph"
    # Four megabytes, and sixteen times as many.
    assert 0 < small.p20_us <= small.p50_us <= small.p80_us < large.p50_us


@on_gpu
def test_what_waits_is_timed_between_events():
    x = torch.zeros(1 << 10, device="cuda")
    assert timing.time_gpu(lambda: x.sum().item(), **EFFORT).method == "events"
    # The failed capture leaves nothing behind.
    assert timing.time_gpu(lambda: x.add_(1), **EFFORT).method == "graph"


@on_gpu
def test_the_host_returns_before_the_gpu_is_done():
    x = torch.zeros(1 << 26, device="cuda")
    latency_us, host_us = timing.time_host(lambda: x.add_(1), **EFFORT)
    assert 0 < host_us < latency_us


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_peers_pass_on_the_device(dtype):
    dense = plans.pattern(300, 200, density=0.05)
    pattern = graph.from_pattern(dense, meta={"heads": 2, "head_dim": 32})
    names = ["sdpa_dense", "sdpa_mask", "sdpa_efficient", "flex"]
    for row in run_baselines(names, Tokens(pattern, dtype=dtype, device="cuda"), Effort(), max_dense_tokens=1000):
        assert row["status"] == "ok", (row["provider"], row["reason"])
        assert row["timing"] in ("graph", "events") and row["cold_us"] > 0 and row["latency_us"] > row["host_us"] > 0
