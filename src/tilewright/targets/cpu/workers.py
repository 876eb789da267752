"""The slots of a CPU: threads that take jobs from one list, each computing alone (stages T3 and T5).

An operator that is shared by all cores ends when the last core is done, thousands of times in a schedule; where another
process takes a core for a moment, all wait. Slots meet once, at the end of the list.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from threading import Barrier, Lock

import torch


class Slots:
    """`n` threads with one core each. Use `slots`, which shares them."""

    def __init__(self, n):
        """Start the threads."""
        self.n, threads = n, torch.get_num_threads()
        started = Barrier(n + 1)

        def begin():
            # A thread takes the last count that any thread has set when torch first needs its own: here, that is now.
            torch.get_num_threads()
            torch.set_num_threads(1)
            started.wait()

        self._pool = ThreadPoolExecutor(n, "tilewright-slot")
        for _ in range(n):
            self._pool.submit(begin)
        started.wait()
        # For threads to come.
        torch.set_num_threads(threads)

    def run(self, call, jobs):
        """``call(job)`` for all `jobs`: the next one goes to the slot that is free first. Raises what a call raises."""
        remaining = iter(jobs)

        def take():
            with torch.inference_mode():
                for job in remaining:
                    call(job)

        for done in [self._pool.submit(take) for _ in range(self.n)]:
            done.result()


@contextmanager
def alone():
    """Operators of this thread compute on its core only, until the end of the block.

    An operator that is shared by the cores leaves its helpers waiting actively for the next one, for milliseconds, on
    the cores that the slots are to have.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_forks(call):
    """`call`, which may share its operators among the cores, made to do so in no forked process.

    The helpers of a thread do not live on in a fork, where it would wait for them for ever.
    """

    @wraps(call)
    def safe(*args, **kwargs):
        if not _forked:
            return call(*args, **kwargs)
        with alone():
            return call(*args, **kwargs)

    return safe


_made, _making, _forked = {}, Lock(), False


def slots(n):
    """The `Slots` of `n` threads that all calls of this process share.

    The threads do not live on in a fork, which makes its own: ask at each call, hold none.
    """
    with _making:
        if n not in _made:
            _made[n] = Slots(n)
        return _made[n]


def _renew():
    global _made, _making, _forked
    # Whoever held the lock is not here to release it.
    _made, _making, _forked = {}, Lock(), True


os.register_at_fork(after_in_child=_renew)
