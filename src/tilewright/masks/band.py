"""A band of keys around each token and a few global tokens: what the published artifact's generator makes.

Beltagy et al., "Longformer", 2020 (arXiv 2004.05150), section 3.1. Of a window w a token i sees i - w/2 to i + w/2.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "band-<tokens>-w<window>-g<globals>, e.g. band-4096-w64-g16"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens: N. window: w. n_global: the first tokens, which see all and are seen by all."""

    tokens: _ready.Positive
    window: _ready.Positive
    n_global: _ready.Count

    def __post_init__(self) -> None:
        if self.n_global > self.tokens:
            raise ConfigError(f"n_global: expected at most the {self.tokens} tokens, found {self.n_global}")


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    return sides.stated(r"band-(?P<tokens>\d+)-w(?P<window>\d+)-g(?P<n_global>\d+)", name)


def graph(params: Params) -> "Graph":
    """The pattern in the order of the sequence."""
    return pattern("band", params)


def pattern(family: str, params: Params, gap: int = 1, hint: np.ndarray | None = None) -> "Graph":
    """The graph of a band, with gaps in its windows where `gap` is above 1. hint: see `_ready.build`."""
    seen = partial(_seen, params.tokens, params.window // 2, gap)
    return _ready.build(family, params, *_ready.with_globals(params.tokens, params.n_global, seen), hint=hint)


def _seen(n, reach, gap, token):
    return np.arange(token - gap * min(reach, token // gap), min(n, token + gap * reach + 1), gap)


def size(params: Params) -> int:
    """Tokens, and the keys of each."""
    return _ready.band_size(params.tokens, params.window + 1, params.n_global)
