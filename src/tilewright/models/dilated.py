"""A dilated band and a few global tokens: each token sees keys around it with gaps between them.

Beltagy et al., "Longformer", 2020 (arXiv 2004.05150), figure 2c. Of a window w and a gap d a token i sees i + t d for
all t from -w/2 to w/2.
"""

import re

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.models import _ready

NAMING = "dilated-<tokens>-w<window>-d<gap>-g<globals>, e.g. dilated-4096-w64-d4-g1"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens: N. window: w. gap: d. n_global: the first tokens, which see all and are seen by all."""

    tokens: _ready.Positive
    window: _ready.Positive
    gap: _ready.Positive
    n_global: _ready.Count

    def __post_init__(self):
        if self.n_global > self.tokens:
            raise ConfigError(f"n_global: expected at most the {self.tokens} tokens, found {self.n_global}")


def fields(name):
    """Parameters stated by a workload name, or None."""
    match = re.fullmatch(r"dilated-(\d+)-w(\d+)-d(\d+)-g(\d+)", name)
    return dict(zip(("tokens", "window", "gap", "n_global"), map(int, match.groups()), strict=True)) if match else None


def graph(params):
    """The pattern in the order of the sequence; tokens of one remainder by the gap belong together."""
    n, gap, reach = params.tokens, params.gap, params.window // 2

    def seen(token):
        return np.arange(token - gap * min(reach, token // gap), min(n, token + gap * reach + 1), gap)

    rows, row_id = _ready.with_globals(n, params.n_global, seen)
    hint = np.where(np.arange(n) < params.n_global, -1, np.arange(n) % gap)
    return _ready.build("dilated", params, rows, row_id, hint=hint)


def sources(params):
    """No file of the user's."""
    return []


def size(params):
    """Tokens, and the keys of each."""
    return _ready.band_size(params.tokens, params.window + 1, params.n_global)
