"""What is made least, layer by layer: each is fixed before the next.

A `Choices` layer is enumerated, the least total first: each group of words takes one of its choices, which fixes some
of them. A `Least` layer is a sum of products of words; it is found by bisection, in words that hold the first
answer's sum: a larger sum is as good as the largest word, and never wraps to a small one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.pushmem.configure.solve import SAT, UNKNOWN, Solver, Term


@dataclass(frozen=True)
class Choice:
    """cost: what is counted. fixed: words by name; least: words that are at least so much."""

    cost: int
    fixed: Mapping[str, int]
    least: Mapping[str, int]


@dataclass(frozen=True)
class Choices:
    """A layer. groups: of choices, one of each is taken."""

    name: str
    groups: Sequence[Sequence[Choice]]

    def combinations(self, known: Mapping[str, int] | None = None) -> Iterator[tuple[int, tuple[Choice, ...]]]:
        """``(total cost, choices)``, the least first; none that changes a word of `known`."""
        known = known or {}
        groups = [
            [each for each in group if all(known.get(name, word) == word for name, word in each.fixed.items())]
            for group in self.groups
        ]
        # Totals of the groups from each one on: there are far more combinations than can be listed.
        totals = [{0}]
        for group in reversed(groups):
            totals.append({choice.cost + total for choice in group for total in totals[-1]})
        totals.reverse()

        def of(place, total):
            if place == len(groups):
                yield ()
                return
            for choice in groups[place]:
                if total - choice.cost in totals[place + 1]:
                    for others in of(place + 1, total - choice.cost):
                        yield choice, *others

        yield from ((total, taken) for total in sorted(totals[0]) for taken in of(0, total))


@dataclass(frozen=True)
class Least:
    """An objective: a sum of products of configuration words that is minimised.

    Parameters
    ----------
    name : str
        Name of the objective in the answer.
    products : sequence
        Lists of factors ``(word, number)``; a factor is the word plus the number.
    """

    name: str
    products: Sequence[Sequence[tuple[str, int]]]

    def value(self, words: Mapping[str, int]) -> int:
        """The sum for known words."""
        total = 0
        for factors in self.products:
            product = 1
            for word, more in factors:
                product *= words[word] + more
            total += product
        return total


def minimised(
    solver: Solver, layer: Least, words: Mapping[str, Term], registers: dict[str, int]
) -> tuple[int | None, dict[str, int]]:
    """``(least value, words)``; the value is None where the solver gave up. The layer is fixed in `solver`.

    words: terms or numbers by name; registers: numbers of all of them that satisfy what is required.
    """
    best, low = layer.value(registers), 0
    products = [[(words[word], more) for word, more in factors] for factors in layer.products]
    term = solver.total(
        products, 1 + max([best.bit_length(), *(_bits(*each) for factors in products for each in factors)])
    )
    while low < best:
        middle = (low + best) // 2
        result = solver.check(solver.at_most(term, middle))
        if result == UNKNOWN:
            return None, registers
        if result == SAT:
            registers = {name: word if isinstance(word, int) else solver.found(word) for name, word in words.items()}
            best = layer.value(registers)
        else:
            low = middle + 1
    solver.require(solver.equal(term, best))
    return best, registers


def _bits(word, more):
    """Bits of a factor, at most."""
    return ((word if isinstance(word, int) else (1 << word.sort().bv_size()) - 1) + more).bit_length()
