"""A graph whose degrees follow a power law: few tokens are seen by very many, most by few.

Chung and Lu, "Connected components in random graphs with given expected degree sequences", Annals of Combinatorics 6,
2002: the token of rank i has the weight (i + 1)^(-1 / (e - 1)), and pairs are drawn by the product of their weights,
so that a share k^-e of the tokens has the degree k.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "powerlaw-<tokens>-d<degree>-e<exponent>, e.g. powerlaw-4096-d32-e2.5"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens: N. degree: keys of a token on average, as far as pairs are not drawn twice, its own aside. exponent: e,
    above 2, where such an average exists. seed: of ranks and pairs."""

    tokens: _ready.Positive
    degree: _ready.Positive
    exponent: Annotated[float, msgspec.Meta(gt=2)]
    seed: _ready.Count = 0

    def __post_init__(self) -> None:
        if self.degree > self.tokens:
            raise ConfigError(f"degree: expected at most the {self.tokens} tokens, found {self.degree}")


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    match = re.fullmatch(r"powerlaw-(\d+)-d(\d+)-e(\d+(?:\.\d+)?)", name)
    return {"tokens": int(match[1]), "degree": int(match[2]), "exponent": float(match[3])} if match else None


def graph(params: Params) -> "Graph":
    """The pattern, with the tokens in no order; each sees itself, and pairs see each other."""
    n, generator = params.tokens, np.random.default_rng(params.seed)
    weight = (generator.permutation(n) + 1.0) ** (-1 / (params.exponent - 1))
    ends = generator.choice(n, (2, _pairs(params)), p=weight / weight.sum())
    seen = np.unique(np.concatenate([ends[0] * n + ends[1], ends[1] * n + ends[0], np.arange(n) * (n + 1)]))
    rows = np.split(seen % n, np.searchsorted(seen, np.arange(1, n) * n))
    return _ready.build("powerlaw", params, rows, np.arange(n))


def _pairs(params):
    return params.tokens * params.degree // 2


def size(params: Params) -> int:
    """Tokens, themselves as keys, and both ends of each pair."""
    return 2 * params.tokens + 2 * _pairs(params)
