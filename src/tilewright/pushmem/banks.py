"""Banks of a buffer: a word's place decides which memory keeps it, so that reads of one cycle ask different ones.

The function of index a is ``(sum of alpha_d · a_d) mod count``. Two ports *collide* where they fire in one cycle and
ask one bank for different words; that no two do is proved by isl. Where no function of at most `MOST` banks exists,
every port has a copy of the whole buffer (pairs of one input and one output).
"""

import itertools
from dataclasses import dataclass

import numpy as np

from tilewright.pushmem.errors import need
from tilewright.pushmem.program import Program, Statement
from tilewright.pushmem.stencil import Schedule

# ASSUME: more banks than the ports of a few tiles are never cheaper than copies.
MOST = 16


@dataclass(frozen=True)
class Bank:
    """The banks of a buffer. alpha: of the function, an integer for each dimension. count: of banks. ports: the bank of
    each read ``(statement, number)`` that asks the same one in all cycles; a wire leads there. copies: whether every
    port has all words, for want of a function."""

    buffer: str
    alpha: tuple[int, ...]
    count: int
    ports: tuple[tuple[tuple[str, int], int], ...] = ()
    copies: bool = False

    @property
    def function(self) -> str:
        """The bank of a word, in words."""
        if self.copies:
            return "each port its own"
        terms = [f"{a}*a{d}" if a > 1 else f"a{d}" for d, a in enumerate(self.alpha) if a]
        return f"({' + '.join(terms) or '0'}) mod {self.count}"

    def of(self, indices: np.ndarray) -> np.ndarray:
        """int64: the bank of each index, an array for each dimension."""
        terms = (np.asarray(i, np.int64) * a for i, a in zip(indices, self.alpha, strict=True))
        return sum(terms, np.int64(0)) % max(1, self.count)  # type: ignore[return-value]  # indices are arrays

    @property
    def folded(self) -> int | None:
        """The dimension whose indices a bank divides by `count`, for it holds each `count`-th of them; None where banks
        go across dimensions."""
        return self.alpha.index(1) if sum(self.alpha) == 1 else None


def bank(program: Program, plan: Schedule, buffer: str, ports) -> Bank:
    """The fewest banks for the reads `ports`, ``(statement, number)`` each, of a buffer."""
    isl = need("islpy")
    shape = program.buffers[buffer].shape
    statements = {s.name: s for s in program.statements}
    apart = isl.Set(f"{{ [{_axes(shape)}] : false }}")
    for one, other in itertools.combinations(ports, 2):
        apart = apart.union(isl.Set(together(statements, plan, one, other)))
    apart = apart.coalesce()
    for count in range(1, MOST + 1):
        for alpha in _functions(len(shape), count):
            if _separates(isl, apart, alpha, count):
                return Bank(buffer, alpha, count, tuple(_wired(statements, ports, alpha, count)))
    return Bank(buffer, (0,) * len(shape), len(ports), tuple((p, k) for k, p in enumerate(ports)), copies=True)


def together(statements: dict[str, Statement], plan: Schedule, one, other) -> str:
    """The differences of the words that two reads ask for in one cycle, other than 0, as an isl set."""
    (first, k), (second, m) = one, other
    s, t = statements[first], statements[second]
    left = {n: f"{n}_l" for n in s.loops}
    # A PE runs one iteration a cycle: two reads of it meet in this one.
    right = left if first == second else {n: f"{n}_r" for n in t.loops}
    bounds = [f"0 <= {left[n]} < {e}" for n, e in zip(s.loops, s.extents, strict=True)]
    if first != second:
        bounds += [f"0 <= {right[n]} < {e}" for n, e in zip(t.loops, t.extents, strict=True)]
        bounds.append(f"{_time(s, plan, left)} = {_time(t, plan, right)}")
    axes = range(len(s.reads[k].indices))
    bounds += [
        f"d{d} = ({_renamed(s.reads[k].indices[d], left)}) - ({_renamed(t.reads[m].indices[d], right)})" for d in axes
    ]
    differ = " or ".join(f"d{d} != 0" for d in axes) or "false"
    names = ", ".join(dict.fromkeys([*left.values(), *right.values()]))
    inside = " and ".join([*bounds, f"({differ})"])
    return f"{{ [{_axes(axes)}] : exists {names} : {inside} }}" if names else f"{{ [{_axes(axes)}] : {inside} }}"


def _axes(shape):
    return ", ".join(f"d{d}" for d in range(len(shape)))


def _time(statement, plan, names):
    terms = [f"{k}*{names[n]}" for k, n in zip(plan.strides[statement.name], statement.loops, strict=True)]
    return " + ".join([*terms, str(plan.starts[statement.name])])


def _renamed(index, names):
    from tilewright.pushmem.dsl import Index

    args = tuple(_renamed(a, names) if isinstance(a, Index) else a for a in index.args)
    return Index("var", (names[args[0]],)) if index.kind == "var" else Index(index.kind, args)


def _functions(rank, count):
    """Factors below `count`, those of one dimension first: their banks hold dense parts of it."""
    if count == 1:
        return [(0,) * rank]
    single = [tuple(int(d == e) for d in range(rank)) for e in reversed(range(rank))]
    return dict.fromkeys([*single, *itertools.product(range(count), repeat=rank)])


def _separates(isl, apart, alpha, count):
    # Negative differences are in one bank where positive ones are.
    total = " + ".join([*(f"{a}*d{d}" for d, a in enumerate(alpha)), "0"])
    same = isl.Set(f"{{ [{_axes(alpha)}] : ({total}) mod {count} = 0 }}")
    return apart.intersect(same).is_empty()


def _wired(statements, ports, alpha, count):
    """Ports that ask one bank in all cycles, and which."""
    for name, k in ports:
        s = statements[name]
        grid = dict(zip(s.loops, np.indices(s.extents, sparse=True), strict=True))
        value = sum((i.evaluate(grid) * a for i, a in zip(s.reads[k].indices, alpha, strict=True)), 0) % count
        found = np.unique(value)
        if len(found) == 1:
            yield (name, k), int(found[0])
