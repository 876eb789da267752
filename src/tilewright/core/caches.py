"""Where this package keeps what it may make again: files of plans and calibrations, and values of recent calls."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

from tilewright.core.errors import ArtifactError

_LOG = logging.getLogger(__name__)
# What a warning said of a folder.
_SAID: set[tuple[str, Path]] = set()


class Recent:
    """Tuples of values by key: the last `each` values of each of the last `keys` keys. Threads may share it."""

    def __init__(self, keys: int, each: int = 1):
        """Nothing is kept yet."""
        self._keys, self._each = keys, each
        self._values: dict = {}
        self._lock = Lock()

    def get(self, key: Any) -> Any:
        """The values of a key, the oldest first; an empty tuple for an unknown one."""
        return self._values.get(key, ())

    def add(self, key: Any, value: Any) -> None:
        """Keep one more value of a key, and drop what is older than the limits allow."""
        with self._lock:
            self._values[key] = (*self._values.get(key, ()), value)[-self._each :]
            while len(self._values) > self._keys:
                del self._values[next(iter(self._values))]

    def items(self) -> Any:
        """Pairs of a key and its values, as they are now."""
        with self._lock:
            return list(self._values.items())


def folder() -> Path:
    """``$TILEWRIGHT_CACHE``, else ``~/.cache/tilewright``; where there is no home, a folder that cannot be made."""
    stated, home = os.environ.get("TILEWRIGHT_CACHE"), os.path.expanduser("~")
    # Who has no home keeps that name. Below a file, nothing can be made.
    return Path(stated) if stated else Path(os.devnull if home == "~" else home) / ".cache" / "tilewright"


def has(path: Path) -> bool:
    """Whether `path` is a file; one that may not be looked at is none."""
    try:
        return path.is_file()
    except OSError:
        return False


@contextlib.contextmanager
def keeping(what: str) -> Iterator[None]:
    """Write what is kept. Where that cannot be written a warning says so, once, and the process goes on without."""
    try:
        yield
    except (OSError, ArtifactError) as error:
        if (what, folder()) not in _SAID:
            _SAID.add((what, folder()))
            _LOG.warning("%s serve this process alone: %s; set TILEWRIGHT_CACHE to another folder", what, error)


@contextlib.contextmanager
def locked(path: Any) -> Iterator[None]:
    """Hold the lock `path`, a file that is made for it; wait for a process that does.

    Where it cannot be made nothing is held: what is guarded is then not kept either.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path, "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
