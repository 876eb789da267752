"""Processes of one process group (Gloo, on the CPU) that run functions of a test."""

import contextlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A collective that some rank does not join ends after so long; ranks of a busy machine load their modules at different
# speeds.
TIMEOUT_S = 60
# Processes, each with its pipe, that are of no group: loading torch takes longer than most tests.
_IDLE = []


class Ranks:
    """`ranks` processes that hold a process group and wait for work.

    folder: an empty one, where they meet. Ends with `close`.
    """

    def __init__(self, ranks, folder):
        self._processes = [_IDLE.pop() if _IDLE else _started() for _ in range(ranks)]
        store = f"file://{Path(folder) / 'store'}"
        for rank, (_, pipe) in enumerate(self._processes):
            pipe.send((_join, (rank, ranks, store)))
        for _, pipe in self._processes:
            assert (error := pipe.recv()) is None, error

    def run(self, function, *args):
        """What ``function(*args)`` returned on each rank, in order; an exception where it raised one."""
        for _, pipe in self._processes:
            pipe.send((function, args))
        return [pipe.recv() for _, pipe in self._processes]

    def results(self, function, *args):
        """As `run`, where no rank may raise."""
        found = self.run(function, *args)
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found

    def close(self):
        """End the group. Its processes wait for another one; those that cannot leave it end."""
        for _, pipe in self._processes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((dist.destroy_process_group, ()))
        for process, pipe in self._processes:
            left = False
            with contextlib.suppress(EOFError, ConnectionError):
                left = pipe.poll(TIMEOUT_S) and pipe.recv() is None
            if left:
                _IDLE.append((process, pipe))
            else:
                process.kill()


def _started():
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    return process, ours


def _join(rank, ranks, store):
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)


def _serve(pipe):
    torch.set_num_threads(1)
    while True:
        function, args = pipe.recv()
        try:
            found = function(*args)
        except Exception as error:
            found = error
        pipe.send(found)
