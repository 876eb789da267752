"""What runs slices on each kind of device: ``slices/<device>``. Contract of the folder:

``executor.py``, optional: attention of groups of queries to lists of keys. A device without it runs no slices.
    ``Executor(layout, device)``, for a `slices.layout.Layout`. Tensors are those of `slices.layout.SliceLists`; nothing
    waits for the device. Its methods:
    ``from_mask(mask) -> (keys, counts, order, state)``: lists of the keys that bool [B or 1, H or 1, G, N_k] flags, the
        flags of a group side by side.
    ``pack(keys, counts) -> bits``, ``unpack(bits) -> (keys, counts, order, state)``: see `SliceLists.pack`.
    ``rank(counts) -> (order, state)``, what follows from the counts of lists made elsewhere.
    ``attend(lists, q, k, v, *, scale, out=None, with_lse=False) -> (out, lse or None)``: attention [B, H, N_q, D] and
        natural log-sum-exps, float32 [B, H, N_q]. lists: the four tensors. out: memory for the result, None for new.
        Groups without keys give zeros and -inf. All is NaN where ``state`` says that a list did not fit. Raises
        `PatternError` or `DeviceError` for tensors other than the layout's, or that need a gradient.

``selection.py``, beside ``executor.py``: which keys such lists hold, see `slices.selection`.
"""

from types import ModuleType

from tilewright import devices
from tilewright.core.errors import DeviceError


def executor(kind: str) -> ModuleType:
    """The module whose `Executor` runs slices on `kind`. Raises `DeviceError` where there is none."""
    if not runs(kind):
        raise DeviceError(f"no slices run on a device of kind {kind!r}; known: {', '.join(kinds())}")
    return devices.module(kind, "slices.executor")


def runs(kind: str) -> bool:
    """Whether slices run on `kind`. Raises `DeviceError` for a kind that is not known."""
    return devices.has(kind, "slices.executor")


def kinds() -> tuple[str, ...]:
    """Names of the devices that run slices."""
    return tuple(filter(runs, devices.NAMES))
