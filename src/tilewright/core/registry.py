"""Families of interchangeable modules: a method is a module, a family is a tuple of module names.

A family package declares ``NAMES``; a member is the module of that name. Adding one is a file and a word.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from tilewright.core import arguments
from tilewright.core.errors import UnknownNameError


def check(what: str, name: Any, known: dict[str, Any] | tuple[Any, ...]) -> None:
    """Raise `UnknownNameError` listing `known` unless `name` is among them."""
    if not isinstance(name, str) or name not in known:
        raise UnknownNameError(what, name if isinstance(name, str) else arguments.shown(name), known)


def member(package: str, what: str, name: str, known: tuple[Any, ...]) -> ModuleType:
    """Import `name` from the family `package` (a dotted path), or raise `UnknownNameError` listing `known`."""
    check(what, name, known)
    return import_module(f"{package}.{name}")
