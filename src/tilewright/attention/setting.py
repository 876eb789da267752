"""What every executor is prepared for: heads, types and scale, the order of the tokens and the bias (stages T3, T5)."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike

from tilewright.attention.masks import Bias, as_bias
from tilewright.attention.units import Units
from tilewright.core.errors import PatternError


@dataclass(frozen=True, eq=False)
class Setting:
    """What all launches of an executor share.

    natural: ``(rows, keys)``, int arrays that map the graph's order to natural token numbers. taken: likewise, to the
        positions of tokens in q, k and v.
    units: which of several patterns each head or image has; None for one pattern.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    natural: tuple[np.ndarray, np.ndarray]
    taken: tuple[np.ndarray, np.ndarray]
    bias: Bias | None
    scale: float | None
    units: Units | None = None


def setting(
    shape: tuple[int, ...],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    row_order: np.ndarray | None = None,
    col_order: np.ndarray | None = None,
    bias: Bias | ArrayLike | None = None,
    scale: float | None = None,
    ordered: bool = False,
) -> Setting:
    """A `Setting` for a pattern of `shape`; see ``prepare`` in `attention.backends`. Raises `PatternError`."""
    natural = []
    for name, order, size in (("row_order", row_order, shape[0]), ("col_order", col_order, shape[1])):
        order = np.arange(size) if order is None else np.asarray(order)
        if order.shape != (size,):
            raise PatternError(f"{name}: expected an order of {size} tokens, found shape {order.shape}")
        natural.append(order)
    rows, keys = natural
    taken = (np.arange(shape[0]), np.arange(shape[1])) if ordered else (rows, keys)
    return Setting(heads, head_dim, dtype, (rows, keys), taken, as_bias(bias, heads, shape), scale)


def of_units(common: Setting, units: Units, shape: tuple[int, int]) -> Setting:
    """The `Setting` where all units' tokens follow one another: U patterns of `shape` (rows, keys) side by side.

    common: of one unit. Where units are heads, those of a token are not side by side: there is one head.
    """
    n = len(units.group)

    def spread(arrays):
        return tuple((np.arange(n)[:, None] * size + array).ravel() for size, array in zip(shape, arrays, strict=True))

    return replace(
        common,
        heads=1 if units.apart else common.heads,
        natural=spread(common.natural),
        taken=spread(common.taken),
        bias=units.bias(common.bias, shape),
        units=units,
    )
