"""Cold calls and the bandwidth of a GPU's memory."""

from types import SimpleNamespace

import pytest
import torch

from tilewright.core.timing import time_gpu
from tilewright_study.measure import device

EFFORT = {"min_reps": 5, "max_seconds": 0.2, "rse_target": 0.05}

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_a_cold_call_is_timed_without_what_empties_the_cache(monkeypatch):
    clock, asked = [0.0], []

    def timed(call, **effort):
        asked.append(effort)
        before = clock[0]
        call()
        return SimpleNamespace(p50_us=clock[0] - before)

    def buffer(size, **_):
        asked.append(size)
        return SimpleNamespace(zero_=lambda: clock.__setitem__(0, clock[0] + 20))

    monkeypatch.setattr(device, "time_gpu", timed)
    monkeypatch.setattr(torch, "empty", buffer)
    assert device.time_cold(lambda: clock.__setitem__(0, clock[0] + 7), 1000, min_reps=3) == 7
    size, *efforts = asked
    assert size > 1000 and efforts == [{"min_reps": 3}] * 2


@on_gpu
def test_a_cold_cache_takes_longer():
    x = torch.zeros(1 << 22, device="cuda")
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    assert device.time_cold(lambda: x.add_(1), l2_bytes, **EFFORT) > time_gpu(lambda: x.add_(1), **EFFORT).p50_us


@on_gpu
def test_a_copy_moves_some_hundred_gigabytes_a_second():
    assert 1e11 < device.copy_bandwidth() < 1e13
