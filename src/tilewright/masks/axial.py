"""Axial attention: each token of a grid sees the row and the column that it lies in.

Ho et al., "Axial Attention in Multidimensional Transformers", 2019 (arXiv 1912.12180), both axes in one layer.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.core import sides
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "axial-<height>x<width>, e.g. axial-64x64"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """height, width: of the grid, in tokens."""

    height: _ready.Positive
    width: _ready.Positive


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    return sides.stated(r"axial-(?P<height>\d+)x(?P<width>\d+)", name)


def graph(params: Params) -> "Graph":
    """The pattern, row by row; a row of the grid is a window."""
    h, w = params.height, params.width
    at = np.arange(h * w).reshape(h, w)
    rows = [np.unique(np.concatenate((at[y], at[:, x]))) for y in range(h) for x in range(w)]
    return _ready.build("axial", params, rows, at.ravel(), grid=(h, w), hint=at.ravel() // w)


def size(params: Params) -> int:
    """Tokens, and a row and a column of keys for each."""
    return params.height * params.width * (params.height + params.width)
