"""Swin's windows over a square grid, plain or shifted by half a window.

Liu et al., "Swin Transformer", ICCV 2021 (arXiv 2103.14030): shifted windows wrap around the grid, and a mask keeps
what comes from opposite edges apart.
"""

import re

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.models import _ready

NAMING = "swin-<side>-w<window>[-shift], e.g. swin-56-w7-shift"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """side: of the grid, in tokens. window: side of a window. shift: whether windows are shifted."""

    side: _ready.Positive
    window: _ready.Positive
    shift: bool = False

    def __post_init__(self):
        if self.side % self.window:
            raise ConfigError(f"side: expected a multiple of the window of {self.window}, found {self.side}")


def fields(name):
    """Parameters stated by a workload name, or None."""
    match = re.fullmatch(r"swin-(\d+)-w(\d+)(-shift)?", name)
    return {"side": int(match[1]), "window": int(match[2]), "shift": match[3] is not None} if match else None


def graph(params):
    """The pattern, row by row of the grid."""
    n, w, shift = params.side, params.window, params.window // 2 * params.shift
    at = (np.arange(n) - shift) % n
    # Windows along one axis; what was wrapped around is apart from what was not.
    part = at // w * 2 + (at >= n - shift)
    _, first, window = np.unique(np.add.outer(4 * n * part, part).ravel(), return_index=True, return_inverse=True)
    # Numbered by first appearance, as distinct rows are.
    window = np.argsort(np.argsort(first))[window]
    rows = [np.flatnonzero(window == each) for each in range(len(first))]
    return _ready.build("swin", params, rows, window, grid=(n, n), hint=window)


def sources(params):
    """No file of the user's."""
    return []


def size(params):
    """Tokens, and each of them in one window."""
    return 2 * params.side**2
