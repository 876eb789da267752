"""The workers of a CPU: threads that take jobs from one list and compute each job on one core (stages T3 and T5).

An operator that all cores share ends when the last core is done, and a schedule calls thousands of them: all cores wait
whenever another process takes one. Workers wait for each other once, at the end of the list. Who calls is one of them.

They are the threads that share torch's own operators, by OpenMP's entry of every parallel loop: after an operator these
spin for milliseconds, and would keep the cores from any others.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from threading import Barrier, Lock
from typing import Any

import torch

from tilewright.core._internals import use_threads

_JOBS = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Of the library that torch has loaded. GNU's, LLVM's and Intel's have it under this name.
_parallel: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
if _parallel:
    _parallel.argtypes, _parallel.restype = [_JOBS, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None


class Workers:
    """`n` threads with one core each, one of which is the caller's. Use `workers`, which shares the others."""

    def __init__(self, n: int):
        """Start the threads, where torch's cannot be had: they do not exist in a fork."""
        self.n, self._pool = n, None
        if n == 1 or (_parallel and not _forked):
            return
        started = Barrier(n)

        def begin():
            use_threads(1)
            started.wait()

        self._pool = ThreadPoolExecutor(n - 1, "tilewright-worker")
        for _ in range(n - 1):
            self._pool.submit(begin)
        started.wait()

    def run(self, call: Callable, jobs: list[tuple[int, int, int]] | Iterable) -> None:
        """``call(job)`` for all `jobs`: a worker takes the next one when it is free. Raises what a call raises."""
        remaining, raised = iter(jobs), []

        def take(_=None):
            try:
                with torch.inference_mode():
                    for job in remaining:
                        call(job)
            except BaseException as error:
                raised.append(error)

        if self.n > 1 and self._pool is None:
            # Inside of the loop an operator of torch's computes on the core of its thread.
            _parallel(_JOBS(take), None, self.n, 0)
        else:
            # Where the caller has taken the last job before another thread wakes up, none is waited for.
            others = [self._pool.submit(take) for _ in range(self.n - 1)] if self._pool else []
            with alone():
                take()
            for other in others:
                if not other.cancel():
                    other.result()
        if raised:
            raise raised[0]


@contextmanager
def alone() -> Iterator[None]:
    """Operators of this thread compute on its own core only, until the end of the block.

    For small operators, and where torch's helper threads may not exist. Threads that start meanwhile have all cores.
    """
    threads = torch.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        use_threads(threads)


def on_one_core(call: Callable, *args: Any) -> Any:
    """``call(*args)`` `alone`, without a context, which takes longer than a small call of torch's."""
    threads = torch.get_num_threads()
    if threads == 1:
        return call(*args)
    use_threads(1)
    try:
        return call(*args)
    finally:
        use_threads(threads)


def in_any_state(call: Callable, device: str = "cpu") -> Callable:
    """`call`, which may share its operators among the cores, changed to do the same under autocast and in forks.

    device: of its tensors. Under autocast torch would compute in fewer bits than the tensors have. The helper threads
    of torch do not exist in a forked process, where an operator would wait for them forever: it runs on one core.
    """

    @wraps(call)
    def safe(*args, **kwargs):
        if not _forked and not torch.is_autocast_enabled(device):
            return call(*args, **kwargs)
        with torch.autocast(device, enabled=False), alone() if _forked else nullcontext():
            return call(*args, **kwargs)

    return safe


def unusual(device: str = "cpu") -> bool:
    """Whether `in_any_state` changes a call now, of tensors on a `device` of this kind."""
    return _forked or torch.is_autocast_enabled(device)


_made: dict = {}
_making, _forked = Lock(), False


def workers(n: int) -> Workers:
    """The `Workers` of `n` threads that all calls of this process share.

    Ask at each call and keep none: the threads do not exist in a fork, which makes its own.
    """
    with _making:
        if n not in _made:
            _made[n] = Workers(n)
        return _made[n]


def _renew():
    global _made, _making, _forked
    # The thread that held the lock does not exist here and cannot release it.
    _made, _making, _forked = {}, Lock(), True


os.register_at_fork(after_in_child=_renew)
