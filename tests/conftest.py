"""What every test runs under: memory that torch hands out uninitialised holds NaN, so that an unwritten row is seen."""

import importlib
import sys

import pytest

# Before any kernel is imported.
importlib.import_module("helpers.gpu")


def pytest_collection_modifyitems(items):
    """The tests on SLURM, which take longest and mostly wait, go first: files are shared out to processes in order."""
    items.sort(key=lambda item: item.path.name != "test_slurm.py")


@pytest.fixture(autouse=True, scope="session")
def nan_in_fresh_memory():
    if "torch" in sys.modules:
        # warn_only: the flag also asks for deterministic operators, which is not what is tested here.
        sys.modules["torch"].use_deterministic_algorithms(True, warn_only=True)
    yield
