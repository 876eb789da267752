"""Errors of push-memory programs and of their mapping."""

from types import ModuleType

from tilewright.core import errors
from tilewright.core.errors import TilewrightError


class ProgramError(TilewrightError):
    """A program that the compiler refuses; the message names the stage and the reason."""


class MappingError(TilewrightError):
    """A program that does not fit the array or the memory tile; the message says what is needed and what is there."""


class CapacityError(MappingError):
    """More words that live at once than a tile holds; the message says how many of which buffer."""


class RunError(TilewrightError):
    """A run that broke a rule of the hardware; the message names the cycle and the unit."""


def need(module: str, extra: str = "push") -> ModuleType:
    """The optional package `module`, or an error that says with which `extra` to install it."""
    return errors.need(module, "push memories", extra, ProgramError)
