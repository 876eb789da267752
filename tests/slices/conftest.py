"""Slices run on every executor: the GPU's on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright.slices import operators

PLACES = {"cpu": "cpu", "cuda": TRITON_DEVICE}


@pytest.fixture(params=PLACES)
def device(request, monkeypatch):
    """Where the executor of a test runs; its lists are all that `slices` makes there."""
    place = PLACES[request.param]
    monkeypatch.setitem(operators.EXECUTORS, place, f"tilewright.slices.{request.param}.executor")
    operators.executor.cache_clear()
    yield torch.device(place)
    operators.executor.cache_clear()


@pytest.fixture
def triton_device(monkeypatch):
    """The device of the kernels alone."""
    monkeypatch.setitem(operators.EXECUTORS, TRITON_DEVICE, "tilewright.slices.cuda.executor")
    operators.executor.cache_clear()
    yield torch.device(TRITON_DEVICE)
    operators.executor.cache_clear()
