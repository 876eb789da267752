"""Files that cross a stage: written whole and then renamed, read strictly.

Every file carries a header with its ``kind``, format ``version`` and what made it (``made_by``). Reading another kind
or version, a truncated or a foreign file raises `ArtifactError` naming the path, what was expected and what was found,
a `VersionError` where it is the version.
"""

import contextlib
import errno
import glob
import json
import lzma
import os
import secrets
import time
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core.errors import ArtifactError, VersionError

_HEADER = "tilewright"
# Of zlib. The higher levels take five times as long for arrays of indices and save a few per cent.
_LEVEL = 1
# ASSUME: no file takes longer to write. What is older was left by a process that was killed.
_ABANDONED_S = 86_400
# What NumPy and zipfile raise for bytes that are no archive, or one that was cut short or altered.
_DAMAGE = (
    *(ValueError, EOFError, OSError, RuntimeError, MemoryError, SyntaxError, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it onto `path` on success, remove it on failure.

    What stood at `path` stays untouched until the new content is complete and on disk. A process that is killed leaves
    its temporary file (a dot file of a name of its own), which nothing reads; the next writer of `path` removes it when
    it is a day old. Raises `ArtifactError`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(6)}{path.suffix}")
    try:
        if path.exists() and not path.is_file():
            # A folder refuses to be replaced, but a device or a pipe does not.
            raise OSError(errno.EINVAL, "expected a file, found a folder, a device or a pipe")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        # Created here, so that two writers cannot share it, with the permissions that the user's umask allows.
        temporary.open("xb").close()
        mode = temporary.stat().st_mode
        yield temporary
        # Some writers put a file of their own, for its owner alone, in its place.
        temporary.chmod(mode)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be written: {error.strerror or error}; an existing file is unchanged"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _remove_abandoned(path):
    """Remove what writers of `path` that were killed have left."""
    stem, suffix = glob.escape(path.stem), glob.escape(path.suffix)
    for left in path.parent.glob(f".{stem}.{'[0-9a-f]' * 12}{suffix}"):
        # Others remove it, too.
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _ABANDONED_S:
                left.unlink()


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, kind: str, version: int, body: Any, made_by: dict[str, Any] | None = None) -> None:
    """Write ``{kind, version, made_by, **body}`` atomically. `body` holds JSON types only."""
    document = {"kind": kind, "version": version, "made_by": made_by or {}, **body}
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Read a document of `version` that `write_json` wrote. Raises `ArtifactError`."""
    with _opened(path, kind) as stream:
        try:
            document = json.loads(stream.read())
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{path}: expected a {kind} file, found damaged JSON: {error}") from error
    _check(path, document, kind, version)
    return document


def write_npz(
    path: str | Path,
    kind: str,
    version: int,
    arrays: dict[str, Any],
    header: Any,
    made_by: dict[str, Any] | None = None,
    compress: bool = False,
) -> None:
    """Write named arrays and a JSON `header` as one ``.npz``, atomically and without a second copy in memory.

    The bytes depend on the arguments only: archive members carry no time.
    """
    document = {"kind": kind, "version": version, "made_by": made_by or {}, "arrays": sorted(arrays), **header}
    text = np.frombuffer(json.dumps(document, allow_nan=False).encode(), dtype=np.uint8)
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with atomic(path) as temporary, zipfile.ZipFile(temporary, "w", method, compresslevel=_LEVEL) as archive:
        for name, array in {_HEADER: text, **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def read_npz(path: str | Path, kind: str, version: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return ``(arrays, header)`` of a file that `write_npz` wrote. Raises `ArtifactError`."""
    with _opened(path, kind) as stream:
        try:
            with np.lib.npyio.NpzFile(stream, allow_pickle=False) as archive:
                # Header first: a foreign file is refused before its arrays are read.
                header = json.loads(bytes(archive[_HEADER]))
                _check(path, header, kind, version)
                arrays = {name: archive[name] for name in archive.files if name != _HEADER}
                named = header.pop("arrays", None)
                if sorted(arrays) != named:
                    raise ValueError(f"expected the arrays {named}, found {sorted(arrays)}")
        except KeyError:
            raise ArtifactError(f"{path}: expected a {kind} file, found an .npz without a tilewright header") from None
        except _DAMAGE as error:
            raise ArtifactError(f"{path}: expected a {kind} file, found a damaged archive: {error}") from error
    return arrays, header


def unpack(path: Path | str, folder: Path | str, kind: str, member: str) -> Any:
    """Extract the archive `path` of files, one of them `member`, to `folder`. Raises `ArtifactError`."""
    with _opened(path, kind) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                if member in archive.namelist():
                    return archive.extractall(folder)
        except _DAMAGE as error:
            raise ArtifactError(f"{path}: expected a {kind} file, found a damaged archive: {error}") from error
    raise ArtifactError(f"{path}: expected a {kind} file, found a foreign or damaged archive")


@contextlib.contextmanager
def _opened(path, kind):
    try:
        with open(path, "rb") as stream:
            yield stream
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a {kind} file") from None
    except OSError as error:
        raise ArtifactError(
            f"{path}: expected a {kind} file, which cannot be read: {error.strerror or error}"
        ) from error


def _check(path, header, kind, version):
    if not isinstance(header, dict):
        raise ArtifactError(f"{path}: expected a {kind} file, found a JSON {type(header).__name__}")
    found = header.get("kind"), header.get("version")
    if found[0] != kind:
        raise ArtifactError(f"{path}: expected kind {kind!r}, found {found[0]!r}")
    if found[1] != version:
        raise VersionError(
            f"{path}: expected {kind} version {version}, found version {found[1]}",
            newer=isinstance(found[1], int) and found[1] > version,
        )
