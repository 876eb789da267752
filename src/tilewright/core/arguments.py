"""Arguments of the public interface, checked where they enter: each error says what was expected and what was found."""

import contextlib
import errno
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.core.errors import ConfigError, DeviceError, TilewrightError, UnknownNameError

# Letters of a value that a message shows.
_SHOWN = 60
# The greatest integer that 32-bit indices hold: what is counted is at most this, unless a function says less.
MOST = 2**31 - 1
# The greatest finite number of 32 bits.
GREATEST = 3.4028234663852886e38


def shown(value: Any) -> str:
    """A value in a message: one short line, arrays by what they are."""
    try:
        if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (type, ModuleType)):
            kind = "" if str(value.dtype).startswith("torch.") else "an array of "
            return f"{kind}{value.dtype} of shape {tuple(value.shape)}"
        text = " ".join(repr(value).split())
    # Of objects that tell nothing of themselves, such as nested tensors of their shape.
    except Exception:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({type(value).__name__})"


def whole(name: str, value: Any, least: int = 1, most: int = MOST, error: type[TilewrightError] = ConfigError) -> int:
    """`value` as an int between `least` and `most`. Raises `error` for others, and for what is no integer."""
    found = None if isinstance(value, bool) else _index(value)
    if found is None or not least <= found <= most:
        wanted = (
            f"of at least {least}" if most == MOST and (found is None or found < least) else f"from {least} to {most}"
        )
        raise error(f"{name}: expected an integer {wanted}, found {shown(value)}")
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
    found = real(value)
    if found is None or (above is not None and not found > above) or (most is not None and found > most):
        wanted = "a finite number" + (f" above {above:g}" if above is not None else "")
        wanted += f", at most {most:g}" if most is not None else ""
        raise error(f"{name}: expected {wanted}, found {shown(value)}")
    return found


def real(value: Any) -> float | None:
    """`value` as a finite float of at most `GREATEST`, as scores and shares are held; None for what is none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if abs(float(value)) <= GREATEST else None
    return None


def plain(value: Any) -> Any:
    """`value` with NumPy's numbers as Python's, in tuples, lists and dicts too: for those that convert by type."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value] if isinstance(value, list) else tuple(map(plain, value))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


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
    found = each(value) or ()
    whole_numbers = [_index(x) for x in found if not isinstance(x, bool)]
    if len(whole_numbers) != count or any(x is None or not least <= x <= MOST for x in whole_numbers):
        raise error(f"{name}: expected {count} integers of at least {least}, found {shown(value)}")
    return tuple(map(int, found))


def each(value: Any) -> tuple[Any, ...] | None:
    """The entries of `value` as a tuple, None for what has none: no text is a list of its letters."""
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    # Of a closed file, an array without dimensions, or a nested tensor.
    except (TypeError, ValueError, RuntimeError):
        return None


def of_kind(kind: type, expected: str, error: type[TilewrightError] = ConfigError, **given: Any) -> None:
    """Raise `error` for what is no `kind`, by name; None may stand for what is not given."""
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise error(f"{name}: expected {expected}, found {shown(value)}")


def device(name: str, value: Any) -> Any:
    """`value` as a ``torch.device``, None for None. Raises `DeviceError` for what torch does not know or have here."""
    import torch

    try:
        found = value if value is None else torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise DeviceError(f"{name}: expected a device of torch, such as cpu or cuda:0, found {shown(value)}") from None
    # Such as torch.cuda; the device meta has none.
    kind: Any = None if found is None else getattr(torch, found.type, None)
    if found is not None and hasattr(kind, "device_count") and (found.index or 0) >= kind.device_count():
        raise DeviceError(f"{name}: expected one of {kind.device_count()} devices of {kind.__name__}, found {found}")
    return found


def path(name: str, value: Any) -> Path:
    """`value` as a `Path`. Raises `ConfigError` for what no file can have as one, such as an empty one."""
    if not isinstance(value, (str, Path)) or not Path(value).name or not _can_be(value):
        raise ConfigError(f"{name}: expected the path of a file, found {shown(value)}")
    return Path(value)


def _can_be(path):
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:
        return False
    return True
