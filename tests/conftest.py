"""What every test runs under: memory that torch hands out uninitialised holds NaN, so that an unwritten row is seen."""

import os
import sys
from pathlib import Path

import pytest

# Where Triton's kernels are tested; the interpreter has to be asked for before a kernel is imported.
TRITON_DEVICE = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
if TRITON_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    """The tests on SLURM, which take longest and mostly wait, go first: files are shared out to processes in order."""
    items.sort(key=lambda item: item.path.name != "test_slurm.py")


@pytest.fixture(autouse=True, scope="session")
def nan_in_fresh_memory():
    if "torch" in sys.modules:
        # warn_only: the flag also asks for deterministic operators, which is not what is tested here.
        sys.modules["torch"].use_deterministic_algorithms(True, warn_only=True)
    yield
