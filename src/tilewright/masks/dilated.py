"""A dilated band and a few global tokens: each token sees keys around it with gaps between them.

Beltagy et al., "Longformer", 2020 (arXiv 2004.05150), figure 2c. Of a window w and a gap d a token i sees i + t d for
all t from -w/2 to w/2.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.core import sides
from tilewright.masks import _ready, band

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "dilated-<tokens>-w<window>-d<gap>-g<globals>, e.g. dilated-4096-w64-d4-g1"

size = band.size


class Params(band.Params, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As of a `band`. gap: d."""

    gap: _ready.Positive


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    return sides.stated(r"dilated-(?P<tokens>\d+)-w(?P<window>\d+)-d(?P<gap>\d+)-g(?P<n_global>\d+)", name)


def graph(params: Params) -> "Graph":
    """The pattern in the order of the sequence; tokens of one remainder by the gap belong together."""
    at = np.arange(params.tokens)
    return band.pattern("dilated", params, params.gap, hint=np.where(at < params.n_global, -1, at % params.gap))
