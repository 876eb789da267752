"""What made a file: digests of inputs and of code, versions of libraries."""

import hashlib
from functools import cache
from importlib import metadata
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
def package_digest() -> str:
    """Short hex digest of all source files of this package."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    text = "".join(f"{file.relative_to(root)} {sha256_file(file)}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
