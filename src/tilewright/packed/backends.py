"""What runs packed batches on each kind of device: ``packed/<device>``.

``executor.py``, optional: see `packed.lists`. A target without it runs no packed batches.
"""

from types import ModuleType

from tilewright import devices
from tilewright.core.errors import DeviceError


def executor(kind: str) -> ModuleType:
    """The module whose `Executor` runs packed batches on `kind`. Raises `DeviceError` where there is none."""
    if not runs(kind):
        raise DeviceError(f"no packed batches run on a device of kind {kind!r}; known: {', '.join(kinds())}")
    return devices.module(kind, "packed.executor")


def runs(kind: str) -> bool:
    """Whether packed batches run on `kind`. Raises `DeviceError` for a kind that is not known."""
    return devices.has(kind, "packed.executor")


def kinds() -> tuple[str, ...]:
    """Names of the targets that run packed batches."""
    return tuple(filter(runs, devices.NAMES))
