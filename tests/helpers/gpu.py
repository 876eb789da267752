"""Where Triton's kernels are tested; the interpreter has to be asked for before a kernel is imported."""

import os
from pathlib import Path

import pytest
import torch

TRITON_DEVICE = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
if TRITON_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
HOPPER = TRITON_DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter, and this machine has no Hopper GPU")


def hide_gpu(monkeypatch):
    """Have torch find no GPU, also where there is one."""
    from tilewright import targets

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Without what was found earlier.
    monkeypatch.setattr(targets, "_described", targets._described.__wrapped__)
