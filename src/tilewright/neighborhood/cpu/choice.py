"""Which boxes a CPU takes: the fastest by a model of products, scores, copies and calls.

Rates are of one core of an EPYC 9004 at float32, in which all types are computed. Boxes are compared by them, so that
their ratios count, which differ little between processors.
"""

from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from tilewright.neighborhood.boxes import Choice, cover
from tilewright.neighborhood.rule import Rule

# Rows of a product, and what it reaches with so many, in GFLOP/s.
_ROWS, _RATES = (1, 2, 4, 8, 16, 32), (10.0, 20.0, 38.0, 63.0, 78.0, 90.0)
# Times in ns: of a score besides products, of a byte of keys or values that is copied, of a box of one head, and of a
# value of its queries.
_SCORE_NS, _BYTE_NS, _BOX_NS, _VALUE_NS = 0.6, 0.25, 500.0, 1.4
# Queries of a box, where the grid has as many, and lengths of its sides in strides.
_FEWEST, _MOST = 16, 64
_SIDES = tuple(2**i for i in range(7))


@lru_cache(256)
def choose(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, threads: int = 1
) -> Choice:
    """The fastest box by the model, and its time on so many cores."""
    core_us, box = min(candidates(rule, grid, heads, kv_heads, dim, v_dim))
    return Choice(box, visited(rule, grid, box), core_us / threads)


def visited(rule: Rule, grid: tuple[int, ...], box: tuple[int, ...]) -> int:
    """Pairs that boxes of this size compute for a head."""
    return prod(cover(*one).pairs for one in zip(rule.axes, grid, box, strict=True))


def candidates(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int
) -> list[tuple[float, tuple[int, ...]]]:
    """``(microseconds of a core, box)`` of all boxes that are considered."""
    longest = [-(-n // d) for n, d in zip(grid, rule.dilation, strict=True)]
    sides = [
        sorted({min(s * side, n) for side in _SIDES} | {min(side, n) for side in _SIDES[: 3 if s > 1 else 0]})
        for s, n in zip(rule.stride, longest, strict=True)
    ]
    fewest, most = min(_FEWEST, prod(longest)), max(_MOST, prod(s for s in rule.stride))
    boxes = [box for box in product(*sides) if fewest <= prod(box) <= most]
    return [(_core_us(rule, grid, heads, kv_heads, dim, v_dim, box), box) for box in boxes]


def _core_us(rule, grid, heads, kv_heads, dim, v_dim, box):
    covers = [cover(*one) for one in zip(rule.axes, grid, box, strict=True)]
    visited, width = prod(one.pairs for one in covers), max(dim, v_dim)
    rows = prod(box) * heads // kv_heads
    gflops = float(np.interp(rows, _ROWS, _RATES))
    ns = visited * heads * (4 * width / gflops + _SCORE_NS)
    # A column of boxes has its keys copied once.
    ns += kv_heads * grid[0] * prod(one.keys for one in covers[1:]) * 8 * width * _BYTE_NS
    ns += kv_heads * prod(one.spans for one in covers) * (_BOX_NS + rows * width * _VALUE_NS)
    return ns / 1e3
