"""Tilewright: scheduled sparse attention for vision transformers.

Importing the package stays light: torch, the solvers and the plotting libraries load with the function that needs them.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from tilewright.core import errors
from tilewright.core.errors import TilewrightError
from tilewright.core.version import __version__

_API = ("Plan", "load", "plan")
_PACKAGES = {name: name for name in ("integrations", "neighborhood", "networks", "nn", "paths", "slices")}
_PACKAGES |= {"models": "networks", "ragged": "packed.pack"}
_FUNCTIONS = {"fold": "networks.folding"}
__all__ = [*_API, *_PACKAGES, *_FUNCTIONS, "TilewrightError", "__version__", "errors"]

# Every module that imports the package would otherwise count the API among its imports.
APART = ("tilewright.attention.plan",)


def __getattr__(name: str) -> Callable | ModuleType:
    if name in _API:
        import tilewright.attention.plan as api

        return getattr(api, name)
    if name in _FUNCTIONS:
        return getattr(import_module(f"tilewright.{_FUNCTIONS[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"tilewright.{_PACKAGES[name]}")
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")


def __dir__() -> list:
    return sorted({*globals(), *__all__})
