"""Where this package keeps what it may make again: plans, calibrations, and what its source files say."""

import contextlib
import fcntl
import os
from pathlib import Path


def folder():
    """``$TILEWRIGHT_CACHE``, else ``~/.cache/tilewright``; where there is no home, a folder that cannot be made."""
    stated = os.environ.get("TILEWRIGHT_CACHE")
    return Path(stated) if stated else Path(os.path.expanduser("~")) / ".cache" / "tilewright"


@contextlib.contextmanager
def locked(path):
    """Hold the lock `path`, a file that is made for it; wait for a process that does.

    Where it cannot be made nothing is held: what is guarded is then not kept either.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path, "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
