"""Which boxes a CPU takes: the fastest by a model of keys and boxes.

Times are of one core of an EPYC 9004. Boxes are compared by them, so that their ratios count, which differ little
between processors.
"""

from functools import lru_cache
from itertools import product
from math import prod

from tilewright.neighborhood.boxes import Choice, cover
from tilewright.neighborhood.cpu import kernel
from tilewright.neighborhood.rule import Rule

# Times in ns: of a key for all queries of a box and for each of its values, of a box and for each of its values, and of
# the call for a grid of sub-axes.
_KEY_NS, _PRODUCT_NS, _BOX_NS, _VALUE_NS, _CALL_NS = 3.2, 0.285, 820.0, 24.0, 140e3


@lru_cache(256)
def choose(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, threads: int = 1
) -> Choice:
    """The fastest box by the model, and its time on so many cores."""
    core_us, box = min(candidates(rule, grid, heads, kv_heads, dim, v_dim))
    return Choice(box, visited(rule, grid, box, heads // kv_heads), core_us / threads)


def together(group: int) -> int:
    """Heads of a box, of `group` that share their keys: as many as there are lanes for."""
    return max(n for n in range(1, kernel.lanes() + 1) if group % n == 0)


def score_ns(dim: int, v_dim: int) -> float:
    """Time of a key's scores and weights in a box."""
    return _KEY_NS + _PRODUCT_NS * (dim + v_dim)


def visited(rule: Rule, grid: tuple[int, ...], box: tuple[int, ...], group: int = 1) -> int:
    """Pairs that boxes of this size compute for a head."""
    return prod(cover(*one).keys for one in zip(rule.axes, grid, box, strict=True)) * kernel.lanes() // together(group)


def candidates(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int
) -> list[tuple[float, tuple[int, ...]]]:
    """``(microseconds of a core, box)`` of all boxes that are considered: they fill more than half of the lanes."""
    longest = [-(-n // d) for n, d in zip(grid, rule.dilation, strict=True)]
    most = kernel.lanes() // together(heads // kv_heads)
    sides = [
        sorted({min(side, n) for i in range(most.bit_length()) for side in (2**i, s * 2**i) if side <= most})
        for s, n in zip(rule.stride, longest, strict=True)
    ]
    fewest = min(most // 2 + 1, max(map(prod, (box for box in product(*sides) if prod(box) <= most))))
    boxes = [box for box in product(*sides) if fewest <= prod(box) <= most]
    units, values = heads // together(heads // kv_heads), dim + v_dim
    calls = prod(rule.dilation) * _CALL_NS
    found = []
    for box in boxes:
        keys, count = (
            prod(x) for x in zip(*(cover(*one) for one in zip(rule.axes, grid, box, strict=True)), strict=True)
        )
        ns = units * (keys * score_ns(dim, v_dim) + count * (_BOX_NS + values * _VALUE_NS)) + calls
        found.append((ns / 1e3, box))
    return found
