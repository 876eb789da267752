"""Means of a few neighbouring queries each, against all keys: exact shares of these means, averaged over the group.

With sub-pools r of `pool` queries, their means q_r, shares w_r of the group, and L_r the log-sum-exp of the scores of
q_r: m_gj = sum_r w_r exp(scale q_r k_j - L_r). The shares of a group sum to 1. Keys are not pooled: single keys are
what is chosen. Two passes over pooled queries times keys, each 1 / (2 pool) of the products of dense attention. Where
one mean stands for a group, and its keys are ranked alone, a factor that all shares have in common changes no list: L_r
is then that of a sample of the keys, and the first pass next to nothing.
"""

from typing import TYPE_CHECKING

import msgspec

from tilewright.core import arguments
from tilewright.core.errors import ConfigError
from tilewright.slices.predictors import Settings, check_part

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.slices.cpu.selection import Selection
    from tilewright.slices.layout import Layout

POOL = 32
# Every so many keys are a sample: no length of a row or of a frame is a multiple of it. Keys of a sample at least.
SAMPLE, FEWEST = 17, 512


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """pool: queries of a mean, a power of two, at most those of a group; None: 32, or the group's where they are
    fewer. sample: log-sum-exps are those of every so many keys; None: 17 where a group has one mean and `keep` alone is
    stated, else 1."""

    pool: int | None = None
    sample: int | None = None

    takes = ("lengths",)

    def check(self, layout: "Layout") -> None:
        """See `Settings`."""
        check_part("pool", self.asked(layout), layout.rows)
        if self.sample is not None and arguments.whole("sample", self.sample) > 1 and self.asked(layout) < layout.rows:
            raise ConfigError(
                f"sample: expected 1 where a group has several means, of {self.asked(layout)} of its {layout.rows} "
                f"queries, found {self.sample}"
            )

    def fitted(self, layout: "Layout", ranked: bool) -> "Params":
        """See `Settings`."""
        if self.sample is not None:
            return self
        alone = ranked and self.asked(layout) == layout.rows and layout.keys >= SAMPLE * FEWEST
        return msgspec.structs.replace(self, sample=SAMPLE if alone else 1)

    def asked(self, layout: "Layout") -> int:
        """Queries of a mean."""
        return min(POOL, layout.rows) if self.pool is None else self.pool


def group_bytes(params: Params, layout: "Layout", head_dim: int) -> int:
    """See the contract: means in the type of q, at most 32 log-sum-exps of each."""
    return layout.keys + layout.rows // params.asked(layout) * (4 * head_dim + 128)


def codes(
    selection: "Selection", q: "Tensor", k: "Tensor", params: Params, *, scale: float, lengths: "Tensor | None"
) -> "Tensor":
    """See the contract."""
    # The first keys of an entry have a sample of their own length.
    sample = 1 if lengths is not None or params.sample is None else params.sample
    return selection.pooled(q, k, params.asked(selection.layout), scale, lengths, sample)
