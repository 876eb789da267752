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


@pytest.fixture(autouse=True, scope="session")
def quick_weights():
    """Weights are drawn without a cut, in a tenth of the time: the published cut lies at 100 standard deviations."""
    if "torch" not in sys.modules:
        yield
        return
    init = sys.modules["torch"].nn.init
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "trunc_normal_", lambda tensor, mean=0.0, std=1.0: init.normal_(tensor, mean, std))
        yield
