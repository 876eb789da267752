"""Python files that are no part of a package."""

import importlib.util
from pathlib import Path


def loaded(path):
    """The file as a module, run anew in each call."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
