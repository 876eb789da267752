"""What made a file: digests of inputs and of code, versions of libraries."""

import hashlib
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np


def sha256_file(path: Path | str) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_arrays(*parts: Any) -> str:
    """Hex digest of arrays (dtype, shape and bytes) and strings, in the order given."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            # The length first, so that ("ab", "c") and ("a", "bc") differ.
            digest.update(f"{len(part)}:{part}".encode())
        else:
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(memoryview(np.ascontiguousarray(part).reshape(-1).data).cast("B") if part.size else b"")
    return digest.hexdigest()


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions of the named distributions; ``None`` where one is absent."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


@cache
def text_digest(*modules: str) -> str:
    """Short hex digest of the source files of `modules`, dotted names, without what they import."""
    specs = [find_spec(module) for module in modules]
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return _digest(zip(modules, files, strict=True))


@cache
def package_digest() -> str:
    """Short hex digest of all source files of this package."""
    root = Path(__file__).parents[1]
    return _digest((str(file.relative_to(root)), file) for file in sorted(root.rglob("*.py")))


def _digest(files):
    """Of pairs of a name and a file."""
    found = hashlib.sha256("".join(f"{name} {sha256_file(file)}\n" for name, file in files).encode())
    return found.hexdigest()[:16]
