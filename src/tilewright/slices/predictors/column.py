"""Shares of the queries themselves, by the published criteria; half of the products of dense attention.

`max` is FG-Attn's (arXiv 2509.16518): the largest share that a query of the group gives to the key, to be used with
``threshold``, 0.5 over the number of keys there. `mean` is Chipmunk's (arXiv 2506.03275): the mean share, with
``keep``. Log-sum-exps hardly change between denoising steps: those of an earlier one can be given.
"""

from typing import TYPE_CHECKING, Literal

from tilewright.slices.predictors import Settings, check_part

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.slices.cpu.selection import Selection
    from tilewright.slices.layout import Layout


class Params(Settings, frozen=True, forbid_unknown_fields=True):
    """criterion: of the group's queries, `max` or `mean`. sample: queries of a group that are asked, evenly spaced, a
    power of two; None: all."""

    criterion: Literal["max", "mean"] = "max"
    sample: int | None = None

    takes = ("lse", "lengths")

    def check(self, layout: "Layout") -> None:
        """See `Settings`."""
        check_part("sample", self.asked(layout), layout.rows)

    def asked(self, layout: "Layout") -> int:
        """Queries of a group that are asked."""
        return layout.rows if self.sample is None else self.sample


def group_bytes(params: Params, layout: "Layout", head_dim: int) -> int:
    """See the contract: at most 16 log-sum-exps of each query."""
    return layout.keys + 64 * params.asked(layout)


def codes(
    selection: "Selection",
    q: "Tensor",
    k: "Tensor",
    params: Params,
    *,
    scale: float,
    lse: "Tensor | None",
    lengths: "Tensor | None",
) -> "Tensor":
    """See the contract."""
    step = selection.layout.rows // params.asked(selection.layout)
    return selection.column(q, k, lse, step, params.criterion == "max", scale, lengths)
