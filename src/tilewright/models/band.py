"""A band of keys around each token and a few global tokens: what the published artifact's generator makes.

Beltagy et al., "Longformer", 2020 (arXiv 2004.05150), section 3.1. Of a window w a token i sees i - w/2 to i + w/2.
"""

import re

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.models import _ready

NAMING = "band-<tokens>-w<window>-g<globals>, e.g. band-4096-w64-g16"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens: N. window: w. n_global: the first tokens, which see all and are seen by all."""

    tokens: _ready.Positive
    window: _ready.Positive
    n_global: _ready.Count

    def __post_init__(self):
        if self.n_global > self.tokens:
            raise ConfigError(f"n_global: expected at most the {self.tokens} tokens, found {self.n_global}")


def fields(name):
    """Parameters stated by a workload name, or None."""
    match = re.fullmatch(r"band-(\d+)-w(\d+)-g(\d+)", name)
    return dict(zip(("tokens", "window", "n_global"), map(int, match.groups()), strict=True)) if match else None


def graph(params):
    """The pattern in the order of the sequence."""
    n, reach = params.tokens, params.window // 2

    def seen(token):
        return np.arange(max(0, token - reach), min(n, token + reach + 1))

    rows, row_id = _ready.with_globals(n, params.n_global, seen)
    return _ready.build("band", params, rows, row_id)


def sources(params):
    """No file of the user's."""
    return []


def size(params):
    """Tokens, and the keys of each."""
    return _ready.band_size(params.tokens, params.window + 1, params.n_global)
