"""What made a file: the commit, and digests of code, beside those of inputs and versions of libraries.

`code_digest` covers a module and everything of these packages that it imports, at any depth, so that a workflow can
rerun exactly the jobs whose code changed. Files beside a module that it names in a text are its code, too, such as
tables and pictures. It reads files only: nothing is imported. Comments, docstrings and the lists of a package's members
(``NAMES``, ``TABLES``, ``FIGURES``) do not count: neither a better explanation nor a new member repeats hours of
timing.

What its imports do not show, a module declares, as a tuple of dotted names:
    ``ENTERED``: modules that its code enters by a string; they count as imported.
    ``APART``: modules that it imports for its callers, and that its own results do not depend on; they do not count.

What a source file says to this is kept in `caches.folder`: to read the package anew takes each job of a workflow as
long as a small stage.
"""

import ast
import contextlib
import hashlib
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tilewright.core import artifacts, caches
from tilewright.core.errors import ArtifactError, UnknownNameError
from tilewright.core.provenance import sha256_arrays as sha256_arrays
from tilewright.core.provenance import sha256_file as sha256_file
from tilewright.core.provenance import versions as versions

# The folder of the packages whose names begin so.
_ROOT = Path(__file__).parents[1]
_PACKAGE = "tilewright"
# The name of a file, with its folders, as texts in code may be one.
_FILE = re.compile(r"[\w-][\w./-]*\.\w+")


@cache
def commit() -> str:
    """Short hash of the commit that this package stands at, with ``+`` where its files differ from it.

    Of the checkout that it lies in; else what ``$TILEWRIGHT_COMMIT`` says, for copies without one; else that of the
    tree that git exported, which commit.txt of an archive names; else empty.
    """

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", _ROOT / _PACKAGE, *arguments], capture_output=True, text=True, check=True
        ).stdout

    try:
        # A package that was installed may lie in a checkout that is not its own.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if git("status", "--porcelain", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        exported = Path(__file__).with_name("commit.txt").read_text().strip()[:10]
        return os.environ.get("TILEWRIGHT_COMMIT") or (exported if exported.isalnum() else "")


@cache
def _path_of(module):
    """Source file of a dotted module of these packages, or None when there is no such module."""
    if not _is_ours(module):
        return None
    base = _ROOT.joinpath(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file() and candidate.is_relative_to(_ROOT):
            return candidate
    return None


def _is_ours(module):
    return module.partition(".")[0].partition("_")[0] == _PACKAGE


class _Source(msgspec.Struct, frozen=True):
    """What a module's source text says.

    digest: of the text, where it stands, and the text that read it; named: what its import statements name, modules and
    names in them; entered, apart: what it declares; texts: those in its code that may be the name of a file beside it;
    code: `canonical`.
    """

    digest: str
    named: tuple[str, ...]
    entered: tuple[str, ...]
    apart: tuple[str, ...]
    texts: tuple[str, ...]
    code: str


@cache
def _source(module):
    """The `_Source` of a module of these packages."""
    path = _path_of(module)
    text = path.read_bytes()
    # A package's imports are relative to itself, a module's to its package.
    digest = hashlib.sha256(path.name.encode() + _own_text() + text).hexdigest()
    kept = caches.folder() / "code" / f"{module}.json"
    try:
        found = msgspec.json.decode(kept.read_bytes(), type=_Source)
        if found.digest == digest:
            return found
    except (OSError, msgspec.MsgspecError, ValueError):
        # Nothing was kept, or it is damaged.
        pass
    tree = ast.parse(text)
    named = _named(tree, module if path.name == "__init__.py" else module.rpartition(".")[0])
    declared = (_declared(tree, name) for name in ("ENTERED", "APART"))
    if path.name == "__init__.py":
        tree.body = [node for node in tree.body if not _lists_members(node)]
    code = _canonical(tree)
    found = _Source(digest, named, *declared, _texts(tree), code)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked
    with contextlib.suppress(ArtifactError):
        artifacts.write_text(kept, msgspec.json.encode(found).decode())
    return found


@cache
def _own_text():
    return Path(__file__).read_bytes()


def _named(tree, parent):
    """Dotted names that the import statements of a tree may mean, in a module that stands in the package `parent`."""
    found: set = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            found.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    return tuple(sorted(name for name in found if _is_ours(name)))


def _texts(tree):
    """Texts of a tree without docstrings that may be the name of a file."""
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return tuple(sorted(text for text in found if _FILE.fullmatch(text)))


@cache
def _data(module):
    """Files beside a module that its code names, but for modules."""
    beside = _path_of(module).parent
    found = (beside / text for text in _source(module).texts if not text.endswith(".py"))
    return [path for path in found if path.is_file()]


@cache
def _imports(module):
    """Modules of these packages that `module` imports, anywhere in its text, or declares in ``ENTERED``.

    Raises `UnknownNameError` for a declared module that is not there.
    """
    source = _source(module)
    for name in source.entered + source.apart:
        _check_known(name)
    found = {name for name in source.named if _path_of(name)}
    return frozenset((found | set(source.entered)) - {module, *source.apart})


def _declared(tree, name):
    """The tuple of strings that a module assigns to `name`; empty where it does not."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and _assigned(node) == [name]]
    return ast.literal_eval(values[-1]) if values else ()


def _check_known(module):
    """Raise `UnknownNameError` unless `module` is one of this package."""
    if _path_of(module) is None:
        known = (path.relative_to(_ROOT).with_suffix("") for path in _ROOT.glob(f"{_PACKAGE}*/**/*.py"))
        raise UnknownNameError("module", module, sorted(".".join(path.parts) for path in known))


@cache
def closure(*modules: str) -> Any:
    """All modules of these packages that `modules` need, themselves included, sorted.

    A package's ``__init__`` counts where it is named in an import, not for being the parent of what is. Members of a
    family that the user chooses by name (`core.registry.member`) have to be listed by the caller. Raises
    `UnknownNameError`.
    """
    seen, todo = set(), list(modules)
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        _check_known(module)
        seen.add(module)
        todo.extend(_imports(module))
    return tuple(sorted(seen))


def canonical(source: bytes | str) -> str:
    """What Python `source` does, as text that is the same under every release of Python that reads it."""
    return _canonical(ast.parse(source))


def _canonical(tree):
    """`canonical` of a tree, which loses its docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return _dump(tree)


def _dump(node):
    """As `ast.dump`, without fields that are empty, which releases add, and with the text of an f-string in one piece,
    which they cut differently."""
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    found = dict(ast.iter_fields(node))
    if isinstance(node, ast.JoinedStr):
        found["values"] = _joined(node.values)
    # The one field for which None is a value.
    shown = {name: value for name, value in found.items() if name == "value" or value not in (None, [])}
    return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in shown.items())})"


def _joined(pieces):
    """The pieces of an f-string, neighbouring texts as one."""
    merged: list = []
    for piece in pieces:
        if isinstance(piece, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(str(merged[-1].value) + str(piece.value))
        elif not isinstance(piece, ast.Constant) or piece.value:
            merged.append(piece)
    return merged


def _lists_members(node):
    """Whether a statement of a package lists its members, or those of which it makes the list."""
    return (
        isinstance(node, ast.Assign)
        and _assigned(node) in ([name] for name in ("NAMES", "_NAMES", "TABLES", "FIGURES"))
        and isinstance(node.value, ast.Tuple)
    )


def _assigned(node):
    """Names that an assignment gives a value."""
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


@cache
def code_digest(*modules: str) -> str:
    """Short hex digest of the code in the import closure of `modules` (dotted names)."""
    return text_digest(*closure(*modules))


def script_digest(path: str | Path, *modules: Any) -> str:
    """As `code_digest`, for the script at `path` and all that it imports, and for `modules` that it enters by name."""
    code, named = _script(path)
    return hashlib.sha256(f"{code}{code_digest(*named, *modules)}".encode()).hexdigest()[:16]


def script_closure(path: str | Path, *modules: Any) -> Any:
    """As `closure`, for what the script at `path` imports, and for `modules` that it enters by name."""
    return closure(*_script(path)[1], *modules)


@cache
def _script(path):
    """``(code, modules)`` of a script: as `canonical`, and those of this package that it imports."""
    tree = ast.parse(Path(path).read_bytes())
    named = tuple(name for name in _named(tree, "") if _path_of(name))
    return _canonical(tree), named


@cache
def text_digest(*modules: Any) -> str:
    """Short hex digest of the code of `modules` (dotted names) themselves, without what they import."""
    digest = hashlib.sha256()
    for module in modules:
        _check_known(module)
        digest.update(module.encode())
        digest.update(_source(module).code.encode())
        for path in _data(module):
            digest.update(f"{path.name}{sha256_file(path)}".encode())
    return digest.hexdigest()[:16]
