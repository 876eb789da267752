"""A limit of time that holds whatever runs: in a process of its own, which ends with all that it started.

A solver looks at its clock now and then only, and other tools not at all.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from time import perf_counter
from typing import TypeVar

from tilewright.core.errors import SolverError, TilewrightError

T = TypeVar("T")
# Seconds after a limit in which a search may end by itself, and then in which its process may remove its files.
GRACE_S, TIDY_S = 0.3, 0.2
# Of Linux: the signal that a process gets as its parent ends.
_PDEATHSIG = 1
# Whether this process has a limit already, and its children that had ended their work, but not yet ended.
_limited = False
_ending: set[int] = set()


def last(answers: Callable[[], Iterator[T]], limit_s: float | None) -> T | None:
    """The last of `answers` that comes within some seconds, None where none does; without a limit the last of all.

    Under another limit, that one decides. Raises what `answers` raises, `SolverError` for a process that ended early.
    """
    global _limited
    if limit_s is None or _limited:
        return next(iter(deque(answers(), maxlen=1)), None)
    _ending.difference_update([*filter(_ended, _ending)])
    end, (receiver, sender) = perf_counter() + limit_s + GRACE_S, Pipe(duplex=False)
    child = os.fork()
    if not child:
        _limited = True
        _work(answers, sender)
    sender.close()
    with suppress(OSError):
        os.setpgid(child, child)
    found, over = None, False
    try:
        while not over and receiver.poll(max(0.0, end - perf_counter())):
            answer, error, over = receiver.recv()
            if error is not None:
                raise error
            found = found if over else answer
        return found
    except EOFError:
        over = True
        raise SolverError("the process of a search ended without an answer") from None
    finally:
        _end(child, receiver, over)


def left(end: float | None) -> float | None:
    """Seconds until `end`, None where there is no limit."""
    return None if end is None else max(0.0, end - perf_counter())


def _ended(child):
    """Whether a process is over; that of another parent is, too."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _work(answers, sender):
    """In the process: send each answer, then that it was the last. Does not return."""
    try:
        os.setpgid(0, 0)
        with suppress(AttributeError, OSError):
            # Where the parent is killed, nobody waits for an answer: Linux ends this process as well.
            ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            for answer in answers():
                sender.send((answer, None, False))
            sender.send((None, None, True))
        except TilewrightError as error:
            sender.send((None, error, True))
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _end(child, receiver, over):
    """End a process and what it started, without waiting for what it takes to give back its memory."""
    if not over:
        with suppress(OSError):
            os.killpg(child, signal.SIGTERM)
        end = perf_counter() + TIDY_S
        with suppress(EOFError):
            while receiver.poll(max(0.0, end - perf_counter())):
                receiver.recv()
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    receiver.close()
    _ending.add(child)
