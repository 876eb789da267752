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


class Ranks:
    """`ranks` processes that hold a process group and wait for work.

    folder: an empty one, where they meet. Ends with `close`.
    """

    def __init__(self, ranks, folder):
        context = mp.get_context("spawn")
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(ranks)), strict=True)
        store = f"file://{Path(folder) / 'store'}"
        self._processes = [
            context.Process(target=_serve, args=(pipe, rank, ranks, store), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process in self._processes:
            process.start()

    def run(self, function, *args):
        """What ``function(*args)`` returned on each rank, in order; an exception where it raised one."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [pipe.recv() for pipe in self._pipes]

    def results(self, function, *args):
        """As `run`, where no rank may raise."""
        found = self.run(function, *args)
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found

    def close(self):
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(TIMEOUT_S)
            process.kill()


def _serve(pipe, rank, ranks, store):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while (work := pipe.recv()) is not None:
        function, args = work
        try:
            found = function(*args)
        except Exception as error:
            found = error
        pipe.send(found)
