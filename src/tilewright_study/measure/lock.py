"""The lock on a device: what is timed has it alone, also where several jobs start side by side (stages T3, T5).

A job on a GPU spends most of its time before the first call: Python, torch, files. So workflows start several at once,
on cores enough for all, and each waits for the lock. On a CPU the workflow itself runs one timed job at a time.
"""

import fcntl
import hashlib
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tilewright import devices
from tilewright.core.errors import DeviceError

# Seconds between two attempts.
PAUSE = 0.1
# Where the locks are: one place for all users of a machine, whatever their TMPDIR.
FOLDER = Path("/tmp")
# The files that this process has locked, the last one last.
_LOCKS = []


@contextmanager
def exclusive(kind):
    """Hold a device of `kind` that nobody else holds by this function; wait for one.

    Of several, the first free one becomes the only one that this process sees: enter before torch uses any. Who waits
    for the same devices gets one in turn.
    ASSUME: all who time on the machine see the same `FOLDER`. Raises `DeviceError` where there is no such device, or
    its lock cannot be opened.
    """
    if kind not in devices.NAMES or not devices.facts(kind).EXCLUSIVE:
        yield
        return
    facts = devices.facts(kind)
    names = facts.available()
    # One of those that wait for the same devices looks for a free one, the others wait for it: none waits for ever.
    digest = hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:12]
    with _opened(FOLDER / f"tilewright-queue-{digest}.lock") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        while (held := next(filter(None, map(_hold, names)), None)) is None:
            time.sleep(PAUSE)
    name, lock = held
    with lock:
        facts.claim(name)
        _LOCKS.append(lock)
        try:
            yield
        finally:
            _LOCKS.pop()


@contextmanager
def untimed():
    """Lend the device that `exclusive` holds to others, for long work on the host; then wait for the same device.

    What runs inside is not timed, and times nothing. Without a lock nothing happens. A program that is being ended does
    not wait for the device.
    """
    if not _LOCKS:
        yield
        return
    lock = _LOCKS[-1]
    fcntl.flock(lock, fcntl.LOCK_UN)
    ending = False
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        ending = True
        raise
    finally:
        if not ending:
            fcntl.flock(lock, fcntl.LOCK_EX)


def _hold(name):
    """``(name, lock)`` of a device that was free, else None. It is given back when the lock is closed, at the latest by
    the end of the process."""
    lock = _opened(FOLDER / f"tilewright-{name}.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return name, lock


def _opened(path):
    """The file `path`, made where there is none, for every user to lock: reading is enough for that.

    Links are not followed and contents are not touched: other users may have put there what they like. Raises
    `DeviceError`.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if not os.path.lexists(path):
            # Another process may come first.
            with suppress(FileExistsError):
                made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
                # Whatever the umask.
                os.fchmod(made, 0o644)
                os.close(made)
        return open(path, opener=lambda name, _: os.open(name, flags))
    except OSError as error:
        raise DeviceError(
            f"expected a lock file {path} that every user can read, found: {error.strerror}; it has to be removed"
        ) from error
