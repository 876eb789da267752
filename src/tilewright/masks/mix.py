"""A sequence of unlike parts: windows, then tokens that see what was kept of all, then tokens that see keys at random;
a few global tokens stand before them.

ASSUME: real sequences of several sources mix patterns in this way, e.g. an image, pruned frames and a graph; no
published model has exactly this one. It is what one tile and one split do not suit.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "mix-<tokens>-w<window>-k<kept>-r<random>-g<globals>, e.g. mix-4096-w64-k512-r48-g16"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens: N. n_global: the first tokens, which see all and are seen by all. The others form three parts of equal
    size: window: w of the first, see `band`; kept: tokens drawn from all that the second sees; n_random: keys that each
    token of the third draws, its own aside. seed: of what is drawn."""

    tokens: _ready.Positive
    window: _ready.Positive
    kept: _ready.Positive
    n_random: _ready.Count
    n_global: _ready.Count
    seed: _ready.Count = 0

    def __post_init__(self) -> None:
        for name in ("kept", "n_random", "n_global"):
            if (found := getattr(self, name)) > self.tokens:
                raise ConfigError(f"{name}: expected at most the {self.tokens} tokens, found {found}")


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    parts = r"(?P<tokens>\d+)-w(?P<window>\d+)-k(?P<kept>\d+)-r(?P<n_random>\d+)-g(?P<n_global>\d+)"
    return sides.stated(f"mix-{parts}", name)


def graph(params: Params) -> "Graph":
    """The pattern in the order of the sequence."""
    n, reach, generator = params.tokens, params.window // 2, np.random.default_rng(params.seed)
    kept = np.sort(generator.choice(n, params.kept, replace=False))
    part = 3 * (np.arange(n) - params.n_global) // max(1, n - params.n_global)

    def seen(token):
        if part[token] == 0:
            return np.arange(max(0, token - reach), min(n, token + reach + 1))
        if part[token] == 1:
            return np.union1d(kept, token)
        return np.union1d(generator.choice(n, params.n_random, replace=False), token)

    return _ready.build("mix", params, *_ready.with_globals(n, params.n_global, seen))


def size(params: Params) -> int:
    """Tokens, and the keys of each."""
    most = max(params.window, params.kept, params.n_random) + 1
    return _ready.band_size(params.tokens, most, params.n_global)
