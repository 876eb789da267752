"""Tilewright: scheduled sparse attention for vision transformers.

Importing the package stays light: torch, the solvers and the plotting libraries load with the function that needs them.
"""

from tilewright.core import errors
from tilewright.core.errors import TilewrightError

__version__ = "0.1.0"
__all__ = ["Plan", "TilewrightError", "__version__", "errors", "load", "models", "nn", "plan"]

# Every module that imports the package would otherwise count the API among its imports.
APART = ("tilewright.api", "tilewright.models", "tilewright.nn")


def __getattr__(name):
    if name in ("plan", "load", "Plan"):
        import tilewright.api as api

        return getattr(api, name)
    if name == "models":
        # Not `from`, which would ask this function.
        import tilewright.models as models

        return models
    if name == "nn":
        import tilewright.nn as nn

        return nn
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
