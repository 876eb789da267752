"""Tilewright: scheduled sparse attention for vision transformers.

Importing the package stays light: torch, the solvers and the plotting libraries load with the function that needs them.
"""

from importlib import import_module

from tilewright.core.errors import TilewrightError

__version__ = "0.1.0"
__all__ = ["Plan", "TilewrightError", "__version__", "load", "models", "plan"]


def __getattr__(name):
    if name in ("plan", "load", "Plan"):
        # By name, so that `core.provenance.closure` does not count the API among the imports of every module.
        return getattr(import_module("tilewright.api"), name)
    if name == "models":
        return import_module("tilewright.models")
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
