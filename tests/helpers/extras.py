"""Optional packages, asked for without importing them: pyosys changes how Python loads all libraries after it."""

from importlib.util import find_spec

import pytest


def need(*packages):
    """Skip the test, or the whole module, unless these are installed."""
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
