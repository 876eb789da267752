"""What every test runs under: memory that torch hands out uninitialised holds NaN, so that an unwritten row is seen."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="session")
def nan_in_fresh_memory():
    if "torch" in sys.modules:
        # warn_only: the flag also asks for deterministic operators, which is not what is tested here.
        sys.modules["torch"].use_deterministic_algorithms(True, warn_only=True)
    yield
