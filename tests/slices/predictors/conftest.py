"""Predictions run on every device: the GPU's on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright.slices import operators, prediction

PLACES = {"cpu": "cpu", "cuda": TRITON_DEVICE}


def forget():
    for cache in (operators.executor, prediction._selection, prediction._memory):
        cache.cache_clear()


@pytest.fixture(params=PLACES)
def device(request, monkeypatch):
    """Where the executor of a test runs; its lists are all that `slices` makes there."""
    place = PLACES[request.param]
    monkeypatch.setitem(operators.EXECUTORS, place, f"tilewright.slices.{request.param}.executor")
    monkeypatch.setitem(prediction.SELECTIONS, place, f"tilewright.slices.{request.param}.selection")
    forget()
    yield torch.device(place)
    forget()
