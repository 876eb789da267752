"""BigBird's blocks: a block of queries sees the blocks around it, some at random, and the first ones, which see all.

Zaheer et al., "Big Bird", NeurIPS 2020 (arXiv 2007.14062), the internal construction (ITC), in blocks as run.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright.masks import _ready

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "bigbird-<tokens>-b<block>-w<window>-r<random>-g<globals>, e.g. bigbird-4096-b64-w3-r3-g2"


class Params(_ready.Sizes, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens: N. block: tokens of a block. window: blocks around a query's own, itself included, odd. n_random: further
    blocks that each block of queries draws. n_global: blocks. seed: of the draw."""

    tokens: _ready.Positive
    block: _ready.Positive
    window: _ready.Positive
    n_random: _ready.Count
    n_global: _ready.Count
    seed: _ready.Count = 0

    def __post_init__(self) -> None:
        if self.window % 2 == 0:
            raise ConfigError(f"window: expected an odd number of blocks, found {self.window}")
        if self.tokens % self.block:
            raise ConfigError(f"tokens: expected a multiple of the block of {self.block}, found {self.tokens}")
        if self.n_global > self.blocks:
            raise ConfigError(f"n_global: expected at most the {self.blocks} blocks, found {self.n_global}")

    @property
    def blocks(self) -> int:
        """Blocks of the sequence."""
        return self.tokens // self.block


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    parts = r"(?P<tokens>\d+)-b(?P<block>\d+)-w(?P<window>\d+)-r(?P<n_random>\d+)-g(?P<n_global>\d+)"
    return sides.stated(f"bigbird-{parts}", name)


def graph(params: Params) -> "Graph":
    """The pattern in the order of the sequence; a block of queries is a window. Windows end with the sequence."""
    count, reach, generator = params.blocks, params.window // 2, np.random.default_rng(params.seed)

    def seen(block):
        near = np.arange(max(0, block - reach), min(count, block + reach + 1))
        left = np.setdiff1d(np.arange(params.n_global, count), near)
        drawn = generator.choice(left, min(params.n_random, len(left)), replace=False)
        return np.union1d(near, drawn)

    rows, row_id = _ready.with_globals(count, params.n_global, seen)
    inside = np.arange(params.block)
    rows = [(row[:, None] * params.block + inside).ravel() for row in rows]
    own = np.arange(params.tokens) // params.block
    return _ready.build("bigbird", params, rows, row_id[own], hint=own)


def size(params: Params) -> int:
    """Tokens, and the keys of each block of queries."""
    blocks = _ready.band_size(params.blocks, params.window + params.n_random, params.n_global)
    return params.tokens + params.block * blocks
