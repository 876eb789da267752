"""Tilewright's attention in modules of other packages.

`sdpa`: in any module that calls `scaled_dot_product_attention`. `diffusers`: by name, through its dispatcher. `natten`:
functions and modules with the names of NATTEN's. Importing this package imports neither torch nor theirs.
"""

from importlib import import_module
from types import ModuleType

_MODULES = ("diffusers", "natten", "sdpa", "timm", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
