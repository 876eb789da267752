"""Arguments of the public interface, checked where they enter: each error says what was expected and what was found."""

import math
import numbers
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.core.errors import ConfigError, DeviceError, TilewrightError, UnknownNameError

# Letters of a value that a message shows.
_SHOWN = 60


def shown(value: Any) -> str:
    """A value in a message: one short line, arrays by what they are."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "" if str(value.dtype).startswith("torch.") else "an array of "
        return f"{kind}{value.dtype} of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({type(value).__name__})"


def whole(
    name: str, value: Any, least: int = 1, most: int | None = None, error: type[TilewrightError] = ConfigError
) -> int:
    """`value` as an int between `least` and `most`. Raises `error` for others, and for what is no integer."""
    found = None if isinstance(value, bool) else _index(value)
    if found is None or found < least or (most is not None and found > most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name}: expected an integer, {wanted}, found {shown(value)}")
    return found


def _index(value):
    # Tensors of one element have an index, too; on a GPU it is waited for.
    if not isinstance(value, numbers.Integral):
        return None
    return operator.index(value)


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    most: float | None = None,
    error: type[TilewrightError] = ConfigError,
) -> float:
    """`value` as a finite float above `above` and at most `most`. Raises `error` for others."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not real or (above is not None and not value > above) or (most is not None and value > most):
        wanted = "a finite number" + (f" above {above:g}" if above is not None else "")
        wanted += f", at most {most:g}" if most is not None else ""
        raise error(f"{name}: expected {wanted}, found {shown(value)}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """`value`, True or False. Raises `ConfigError` for others."""
    if value is not True and value is not False:
        raise ConfigError(f"{name}: expected True or False, found {shown(value)}")
    return value


def name_of(what: str, value: Any, known: Sequence[str]) -> str:
    """`value`, one of the `known` names. Raises `UnknownNameError` for others."""
    if not isinstance(value, str) or value not in known:
        raise UnknownNameError(what, value if isinstance(value, str) else shown(value), known)
    return value


def sizes(
    name: str, value: Any, count: int, error: type[TilewrightError] = ConfigError, least: int = 1
) -> tuple[int, ...]:
    """`value` as a tuple of `count` integers of at least `least`. Raises `error` for others."""
    found = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    whole_numbers = [_index(x) for x in found if not isinstance(x, bool)]
    if len(whole_numbers) != count or any(x is None or x < least for x in whole_numbers):
        raise error(f"{name}: expected {count} integers, at least {least} each, found {shown(value)}")
    return tuple(map(int, found))


def of_kind(kind: type, expected: str, error: type[TilewrightError] = ConfigError, **given: Any) -> None:
    """Raise `error` for what is no `kind`, by name; None may stand for what is not given."""
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise error(f"{name}: expected {expected}, found {shown(value)}")


def device(name: str, value: Any) -> Any:
    """`value` as a ``torch.device``, None for None. Raises `DeviceError` for what torch does not know."""
    import torch

    try:
        return value if value is None else torch.device(value)
    except (RuntimeError, TypeError):
        raise DeviceError(f"{name}: expected a device of torch, such as cpu or cuda:0, found {shown(value)}") from None


def path(name: str, value: Any) -> Path:
    """`value` as a `Path`. Raises `ConfigError` for what is none, and for an empty one."""
    if not isinstance(value, (str, Path)) or not Path(value).name:
        raise ConfigError(f"{name}: expected the path of a file, found {shown(value)}")
    return Path(value)
