"""Kernels that a plan launches in each call on other memory, beside those of `launcher` (stage T5)."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from tilewright.devices.cuda import launcher


class Repeated:
    """A kernel that takes its tensors first: one launch through Triton for all that is no address, further ones direct.

    No tensor is kept between calls. Several threads may call it.
    """

    def __init__(self, kernel: Any, device: torch.device | str, refused: str):
        """refused: what a `DeviceError` says where a capture comes before the first such call."""
        self._kernel, self._refused = kernel, refused
        self._stream = launcher.current_stream(device)
        # By stream, alignment and type of the tensors, grid and what follows them: direct launches.
        self._known, self._lock = launcher.recent(), Lock()

    def __call__(self, grid: tuple[int, ...], tensors: Sequence[Tensor], following: tuple, **options: Any) -> None:
        """Launch on `grid`, three numbers; following: all arguments after the tensors, constants included.

        options: of Triton, a function of the others.
        """
        addresses = [x.data_ptr() for x in tensors]
        offsets = [at & (launcher.ALIGNED - 1) for at in addresses]
        key = self._stream(), *offsets, *[x.dtype for x in tensors], *grid, *following
        *_, launch = (None, *self._known.get(key))  # type: ignore[misc]  # a list of one or none
        if launch is not None and launcher.RECORDER.get() is None:
            launch(*addresses)
            return
        # Threads compile and store their calls one after the other.
        with self._lock:
            if not any(known[1:] == key[1:] for known, _ in self._known.items()):
                launcher.expect_no_capture(self._refused)
            compiled = self._kernel[grid](*tensors, *following, **options)
            launcher.taken_down(compiled, grid, tensors, following)
            if launch is None and not launcher.capturing():
                self._known.add(key, launcher.direct(compiled, grid, key[0], following))
