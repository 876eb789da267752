"""Files that cross a stage: written whole and then renamed, read strictly.

Every file carries a header with its ``kind``, format ``version`` and what made it (``made_by``). Reading another kind or
version, a truncated or a foreign file raises `ArtifactError` naming the path, what was expected and what was found.
"""

import contextlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from tilewright.errors import ArtifactError

_HEADER = "tilewright"


@contextlib.contextmanager
def atomic(path):
    """Yield a temporary path beside `path`; rename it onto `path` on success, remove it on failure.

    What stood at `path` stays untouched until the new content is complete and on disk.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    os.close(handle)
    try:
        yield Path(temporary)
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be written: {error.strerror or error}; what was there before is unchanged"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path, text):
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text)


def write_json(path, kind, version, body, made_by=None):
    """Write ``{kind, version, made_by, **body}`` atomically. `body` holds JSON types only."""
    document = {"kind": kind, "version": version, "made_by": made_by or {}, **body}
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_json(path, kind, version):
    """Read a document that `write_json` wrote, as a dict. Raises `ArtifactError`."""
    try:
        document = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a {kind} file") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: expected a {kind} file, found damaged JSON: {error}") from error
    if not isinstance(document, dict):
        raise ArtifactError(f"{path}: expected a {kind} file, found a JSON {type(document).__name__}")
    _check(path, document, kind, version)
    return document


def write_npz(path, kind, version, arrays, header, made_by=None, compress=False):
    """Write named arrays and a JSON `header` as one ``.npz``, atomically."""
    document = {"kind": kind, "version": version, "made_by": made_by or {}, **header}
    text = np.frombuffer(json.dumps(document, allow_nan=False).encode(), dtype=np.uint8)
    with atomic(path) as temporary, open(temporary, "wb") as stream:
        (np.savez_compressed if compress else np.savez)(stream, **{_HEADER: text}, **arrays)


def read_npz(path, kind, version):
    """Return ``(arrays, header)`` of a file that `write_npz` wrote. Raises `ArtifactError`."""
    try:
        raw = Path(path).read_bytes()
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(bytes(arrays.pop(_HEADER)))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a {kind} file") from None
    except KeyError:
        raise ArtifactError(f"{path}: expected a tilewright {kind} file, found an .npz without its header") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: expected a {kind} file, found a damaged archive: {error}") from error
    _check(path, header, kind, version)
    return arrays, header


def _check(path, header, kind, version):
    found = header.get("kind"), header.get("version")
    if found[0] != kind:
        raise ArtifactError(f"{path}: expected kind {kind!r}, found {found[0]!r}")
    if found[1] != version:
        raise ArtifactError(f"{path}: expected {kind} version {version}, found version {found[1]}")
