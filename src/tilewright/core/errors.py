"""Every error that a user can meet. Each says what was expected, what was found and what is known."""

import copyreg
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

# What a name begins with: the family of a workload, the form of a pattern, a whole name of letters.
_HEAD = re.compile(r"[A-Za-z_]*")


class TilewrightError(Exception):
    """Base of all errors raised on purpose by this package."""

    def __reduce__(self) -> tuple:
        """How it passes between processes: as it is, whatever its class takes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]  # public in C


class UnknownNameError(TilewrightError):
    """A name that no registry holds; the message lists the names that are known."""

    def __init__(self, what: str, name: Any, known: Iterable):
        """State that `name` is no `what`, and which names are."""
        known = list(map(str, known))
        heads = {_HEAD.match(one)[0] for one in known}  # type: ignore[index]  # matches any text
        begin = _HEAD.match(name)[0] if isinstance(name, str) else ""  # type: ignore[index]
        close = [] if begin in heads else get_close_matches(begin, sorted(heads), 1, 0.75)
        hint = f"; did you mean {close[0]}{name[len(begin) :]}?" if close else ""
        super().__init__(f"unknown {what} {name!r}; known: {', '.join(known)}{hint}")


class ConfigError(TilewrightError):
    """A configuration value of the wrong type, out of range, or an unknown key."""


class PatternError(TilewrightError):
    """An attention pattern that is not what the operation needs (shape, dtype, order of indices, emptiness)."""


class ArtifactError(TilewrightError):
    """A file that is missing, damaged, of another stage or version, or made from other inputs."""


class VersionError(ArtifactError):
    """A file of a format version that this version of the package does not read. newer: than those that it reads."""

    def __init__(self, message: str, newer: bool = False):
        """State `message`."""
        super().__init__(message)
        self.newer = newer


class TileError(TilewrightError):
    """A tile that cannot be parsed or does not fit the graph or the device."""


class SolverError(TilewrightError):
    """A solver that is missing, unlicensed, over its size limit, or returned no usable answer."""


class SolverUnavailableError(SolverError):
    """A solver that cannot run on this machine: its package or its licence is missing, or its licence is too small."""


class InfeasibleError(SolverError):
    """A scheduling problem that no schedule satisfies; the message names the limits that exclude all of them."""


class DeviceError(TilewrightError):
    """A device that is absent, or differs from the one that an artifact was made for."""


class TrainingError(TilewrightError):
    """A training that cannot go on: many of its gradients are not finite."""


class Unavailable(TilewrightError):
    """An attention, a batching or a baseline that cannot run here, or not for this pattern, and why."""


class BudgetError(TilewrightError):
    """A budget of time that is no positive number, or that no path of a table promises to meet."""


def need(module: str, what: str, extra: str, error: type[TilewrightError] = Unavailable) -> ModuleType:
    """The optional package `module`, or an `error` that says what needs it, and with which extra it comes."""
    try:
        return import_module(module)
    except ImportError:
        raise error(f"{what} need {module.partition('.')[0]}: {install(extra)}") from None


def install(extra: str = "push") -> str:
    """How to install an extra of this package, which is in no index, in a message."""
    return f'pip install ".[{extra}]" in the checkout of tilewright'
