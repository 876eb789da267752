"""Kernels that draw scenes, on each kind of device: ``scenes/<device>.py``.

A kernel that draws scenes is optional. Without it they are drawn on the CPU.
    ``draw(arrays, texels, pixels) -> (pictures, labels, owners)``: what `drawing.drawn` draws, uint8 [B, 3, H, W] and
        twice [B, H, W], before outlines are taken. arrays: of `drawing.Listed`, NumPy's; texels: of `drawing.texels`,
        on the device.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def scenes(kind: str) -> ModuleType | None:
    """The module that draws scenes on `kind`, None where there is none."""
    return import_module(modules(kind)[0]) if modules(kind) else None


def modules(kind: str) -> tuple[str, ...]:
    """The dotted name of that module, for digests of code: it is entered by name. Empty where there is none."""
    name = f"{__package__}.{kind}"
    return (name,) if find_spec(name) is not None else ()
