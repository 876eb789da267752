"""What files hold, checked as they are read: fields by type, arrays by form, numbers by range.

Each function raises `ArtifactError` naming the file, what was expected and what was found.
"""

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from tilewright.core.errors import ArtifactError

# Types of JSON fields. Sizes are those that 32-bit indices can count.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


def fields(path: str | Path, kind: str, document: Any, form: Any) -> Any:
    """`document` (of JSON) as a value of the class `form`, whose annotations tell what its fields hold."""
    try:
        return msgspec.convert(document, form)
    except msgspec.ValidationError as error:
        raise ArtifactError(f"{path}: expected a complete {kind} file, found: {said(error, form)}") from None


def said(error: msgspec.ValidationError, form: type) -> str:
    """What an error says of a value of the class `form`, with the values that are known where a field is another."""
    text = str(error).removeprefix("Object contains ")
    match = re.fullmatch(r"Invalid enum value (.+) - at `\$\.(\w+)`", text)
    if match and (known := _literals(get_type_hints(form).get(match[2]))):
        return f"{match[2]}: expected one of {', '.join(map(str, known))}, found {match[1]}"
    if match := re.fullmatch(r"Expected (.+?)(?:, got (.+?))? - at `\$\.?(.+)`", text):
        found = f", found {match[2]}" if match[2] else ""
        return f"{match[3]}: expected {match[1]}{found}".replace("`", "")
    return text


def _literals(hint):
    """The values that a type states, also as one of several types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for each in get_args(hint) for value in _literals(each))


def expect(path: str | Path, holds: Any, expected: str, found: Any) -> None:
    """Raise unless a condition `holds`, given in words by what was `expected` and `found`."""
    if not holds:
        raise ArtifactError(f"{path}: expected {expected}, found {found}")


def arrays(path: Path | str, found: dict[str, np.ndarray], **forms: Any) -> None:
    """Check the arrays `found` by name: of each of `forms` a dtype and a shape, in which None is any length."""
    expect(path, found.keys() == forms.keys(), f"the arrays {sorted(forms)}", sorted(found))
    for name, (dtype, *shape) in forms.items():
        have = found[name]
        fits = have.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, have.shape, strict=True))
        wanted = f"{name}: {np.dtype(dtype)} {['any' if n is None else n for n in shape]}"
        expect(path, fits and have.dtype == dtype, wanted, f"{have.dtype} {list(have.shape)}")


def within(path: str | Path, name: str, values: Any, lowest: int, highest: float) -> None:
    """Check that no number of the array `values` lies outside ``lowest..highest``; a NaN does."""
    inside = not values.size or (values.min() >= lowest and values.max() <= highest)
    expect(path, inside, f"{name}: {lowest}..{highest}", "" if inside else f"{values.min()}..{values.max()}")


def bounds(path: Path | str, name: str, ptr: np.ndarray, last: int, shortest: int = 0, longest: float = np.inf) -> None:
    """Check that ``ptr`` cuts ``0..last`` into pieces of `shortest` to `longest`."""
    ends = f"{ptr[0]}..{ptr[-1]}" if len(ptr) else "none"
    expect(path, len(ptr) and ptr[0] == 0 and ptr[-1] == last, f"{name}: bounds from 0 to {last}", ends)
    # In order of size, lest differences overflow.
    within(path, name, ptr, 0, last)
    within(path, f"steps of {name}", np.diff(ptr), shortest, longest)


def permutation(path: str | Path, name: str, order: np.ndarray) -> None:
    """Check that `order` holds each number below its length once."""
    within(path, name, order, 0, len(order) - 1)
    missing = np.flatnonzero(np.bincount(order, minlength=len(order)) == 0)
    expect(path, not len(missing), f"{name}: each of 0..{len(order) - 1} once", f"no {missing[:1]}")
