"""Modules of compiled functions that large patterns profit from, used where they are compiled already.

numba compiles such a module in some ten seconds, longer than most plans take, and keeps the machine code beside the
source or in ``$NUMBA_CACHE_DIR``. No plan waits for that: `load` gives a module after `prepare` has compiled it, which
``tilewright compile`` and ``tilewright calibrate`` do, and None before. Callers have another way to the same result.
"""

import hashlib
import logging
import os
import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.core import artifacts, caches
from tilewright.core.errors import ArtifactError

_LOG = logging.getLogger(__name__)
# What makes machine code that of another processor.
_PROCESSOR = "model name", "flags"


def prepare(name: str) -> ModuleType:
    """Compile the module `name`, whose functions state their types, and remember that its machine code is kept."""
    module = import_module(name)
    try:
        artifacts.write_text(_note(name), "")
    except ArtifactError as error:
        _LOG.warning("%s is compiled for this process alone: %s", name, error)
    load.cache_clear()
    return module


@cache
def load(name: str) -> ModuleType | None:
    """The module `name` if `prepare` has compiled it on a machine like this one, else None, which a warning says."""
    if name in sys.modules or is_prepared(name):
        return import_module(name)
    _LOG.warning("large patterns are planned faster after `tilewright compile`, once on this machine")
    return None


def is_prepared(name: str) -> bool:
    """Whether `prepare` has compiled the module `name` on a machine like this one."""
    return caches.has(_note(name))


def njit(*arguments: Any, **options: Any) -> Any:
    """``numba.njit``, whose functions are compiled for this process alone where numba has no folder to keep them in."""
    import numba

    # Nobody calls them from C.
    options = {"no_cfunc_wrapper": True} | options

    def compiled(function):
        try:
            return numba.njit(*arguments, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
        _say_unkept()
        return numba.njit(*arguments, **options | {"cache": False})(function)

    return compiled


@cache
def _say_unkept():
    _LOG.warning("compiled functions serve this process alone: set NUMBA_CACHE_DIR to a folder that can be written")


def _note(name):
    """The file that says that a module is compiled: by its text and place, numba and Python, and the processor."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None, name
    path = Path(spec.origin)
    kept = os.environ.get("NUMBA_CACHE_DIR", ""), str(path), sys.version, metadata.version("numba"), *_processor()
    digest = hashlib.sha256("\n".join(kept).encode() + path.read_bytes()).hexdigest()[:16]
    return caches.folder() / "compiled" / f"{name}-{digest}"


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [next((line for line in lines if line.startswith(field)), "") for field in _PROCESSOR]
