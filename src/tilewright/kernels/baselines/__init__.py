"""What a schedule is measured against (stage T5).

Contract of a member module:
    ``MASKED``: whether it computes the pattern, or attention over all pairs.
    ``DENSE``: whether it works through all pairs in any case.
    ``prepare(graph, *, dtype, max_bytes) -> Ready``: ready to be timed, tokens in the order of `graph`, with tables of
        at most `max_bytes`. What a network does once, compiling included, is done by then or in the first call. Raises
        `Unavailable`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.errors import TilewrightError

NAMES = ("sdpa_dense", "sdpa_mask", "flex")


class Unavailable(TilewrightError):
    """A baseline that cannot run here, or not for this pattern, and why."""


@dataclass(frozen=True)
class Ready:
    """A prepared baseline: call it with q, k, v. held_bytes: its tables. executed: pairs that a head works through."""

    call: Callable
    held_bytes: int
    executed: int
