"""Which boxes a CPU takes: the fastest by a model of products, scores, copies, boxes and calls.

Rates are of one core of an EPYC 9004 at float32, in which all types are computed. Boxes are compared by them, so that
their ratios count, which differ little between processors.
"""

from functools import lru_cache
from itertools import product
from math import ceil, prod

import numpy as np

from tilewright.neighborhood.boxes import Choice, cover
from tilewright.neighborhood.cpu.columns import held_tokens, length, side_by_side
from tilewright.neighborhood.rule import Rule

# Rows of a product, and what it reaches with so many, in GFLOP/s.
_ROWS, _RATES = (1, 2, 4, 8, 16, 32), (10.0, 20.0, 38.0, 63.0, 83.0, 90.0)
# Times in ns: of a score besides products, of a byte of keys or values that is copied, of a box of one head, of a value
# of its queries, and of a call for the boxes of a run.
_SCORE_NS, _BYTE_NS, _BOX_NS, _VALUE_NS, _CALL_NS = 1.05, 0.1, 500.0, 3.1, 95e3
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
    return [(_core_us(rule, grid, heads, kv_heads, max(dim, v_dim), box), box) for box in boxes]


def _core_us(rule, grid, heads, kv_heads, width, box):
    covers = _, *across = [cover(*one) for one in zip(rule.axes, grid, box, strict=True)]
    visited = prod(one.pairs for one in covers)
    rows = prod(box) * heads // kv_heads
    gflops = float(np.interp(rows, _ROWS, _RATES))
    ns = visited * heads * (4 * width / gflops + _SCORE_NS)
    # A column of boxes has its keys copied once.
    ns += kv_heads * grid[0] * prod(one.keys for one in across) * 8 * width * _BYTE_NS
    ns += kv_heads * prod(one.spans for one in covers) * (_BOX_NS + rows * width * _VALUE_NS)
    return (ns + _calls(covers, grid, rule.dilation, kv_heads, width, box) * _CALL_NS) / 1e3


def _calls(covers, grid, dilation, kv_heads, width, box):
    """Calls for runs of boxes, on one core: a share of them falls to each of several, which split the heads further."""
    along, *across = covers
    held = held_tokens(width, prod(one.keys / one.spans for one in across))
    parts = ceil(along.spans / dilation[0] / length(held, along.keys / along.spans, box[0]))
    columns = prod(one.spans for one in across)
    places = parts * columns // prod(dilation[1:])
    groups = ceil(kv_heads / side_by_side(held, grid[0] // dilation[0], places, kv_heads, threads=1))
    return groups * columns * (along.runs + (parts - 1) * dilation[0])
