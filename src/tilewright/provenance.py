"""What made a file: digests of inputs and of code, versions of libraries.

`code_digest` covers a module and everything of this package that it imports, at any depth, so that a workflow can rerun
exactly the jobs whose code changed. It reads source text only: nothing is imported.
"""

import ast
import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parent
_PACKAGE = _ROOT.name


def sha256_file(path):
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_arrays(*parts):
    """Hex digest of arrays (dtype, shape and bytes) and strings, in the order given."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
        else:
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(memoryview(part.reshape(-1)).cast("B") if part.size else b"")
    return digest.hexdigest()


def versions(*packages):
    """Installed versions of the named distributions; ``None`` where one is absent."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _path_of(module):
    """Source file of a dotted module of this package, or None when there is no such module."""
    parts = module.split(".")
    if parts[0] != _PACKAGE:
        return None
    base = _ROOT.joinpath(*parts[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file() and candidate.is_relative_to(_ROOT):
            return candidate
    return None


@cache
def _imports(module):
    """Modules of this package that `module` imports, anywhere in its text."""
    path = _path_of(module)
    parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            names = [base] + [f"{base}.{alias.name}" for alias in node.names]
        found.update(name for name in names if _path_of(name))
    return frozenset(found - {module})


@cache
def closure(*modules):
    """All modules of this package that `modules` need, themselves included, sorted."""
    seen, todo = set(), list(modules)
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        if _path_of(module) is None:
            raise ValueError(f"no module {module!r} in {_ROOT}")
        seen.add(module)
        todo.extend(_imports(module))
    return tuple(sorted(seen))


@cache
def code_digest(*modules):
    """Short hex digest of the sources in the import closure of `modules` (dotted names)."""
    digest = hashlib.sha256()
    for module in closure(*modules):
        digest.update(module.encode())
        digest.update(_path_of(module).read_bytes())
    return digest.hexdigest()[:16]
