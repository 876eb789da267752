"""Adapter of the solver Bitwuzla: terms over words and arrays, questions with assumptions, a limit of time."""

import math
from collections.abc import Sequence
from functools import reduce
from time import perf_counter
from typing import Any, TypeAlias

from tilewright.core.errors import SolverUnavailableError, install
from tilewright.pushmem.configure.system import Node
from tilewright.pushmem.configure.words import COMPARED

# Of Bitwuzla, which says no types; or a number.
Term: TypeAlias = Any
SAT, UNSAT, UNKNOWN = "sat", "unsat", "unknown"
# Of operators whose terms have other names.
_KINDS = {
    **{"eq": "EQUAL", "iff": "EQUAL", "neq": "DISTINCT", "implies": "IMPLIES", "sll": "BV_SHL", "srl": "BV_SHR"},
    **{"sra": "BV_ASHR", "ulte": "BV_ULE", "ugte": "BV_UGE", "slte": "BV_SLE", "sgte": "BV_SGE"},
    **{"read": "ARRAY_SELECT", "write": "ARRAY_STORE"},
    **{f"{op}o": f"BV_{op.upper()}_OVERFLOW" for op in ("uadd", "sadd", "usub", "ssub", "umul", "smul", "sdiv")},
}


class TimeOver(Exception):
    """The time of a solver is over, while terms are made."""


class Solver:
    """One solver and its terms. limit_s: seconds that all its questions may take together; None: no limit.

    Raises `SolverUnavailableError` where Bitwuzla is not installed.
    """

    def __init__(self, limit_s: float | None = None):
        try:
            import bitwuzla
        except ImportError as error:
            raise SolverUnavailableError(f"bmc needs bitwuzla: {install()} ({error})") from error
        self._of = bitwuzla
        self.terms = bitwuzla.TermManager()
        options = bitwuzla.Options()
        options.set(bitwuzla.Option.PRODUCE_MODELS, True)
        options.set(bitwuzla.Option.PRODUCE_UNSAT_ASSUMPTIONS, True)
        self._solver = bitwuzla.Bitwuzla(self.terms, options)
        self._deadline = math.inf if limit_s is None else perf_counter() + limit_s
        self._solver.configure_terminator(lambda: perf_counter() > self._deadline)
        self._bit, self._zero, self._one = self.terms.mk_bool_sort(), self.value(0, 1), self.value(1, 1)
        self._taken: Sequence = ()

    def in_time(self) -> None:
        """Raise `TimeOver` where the time is over."""
        if perf_counter() > self._deadline:
            raise TimeOver

    def value(self, number: int, width: int) -> Term:
        """A constant word."""
        return self.terms.mk_bv_value(self.terms.mk_bv_sort(width), number)

    def unknown(self, name: str, width: int, index: int = 0) -> Term:
        """A word to be found; an array of words where `index` has bits."""
        sort = self.terms.mk_bv_sort(width)
        return self.terms.mk_const(
            self.terms.mk_array_sort(self.terms.mk_bv_sort(index), sort) if index else sort, name
        )

    def array(self, index: int, width: int, term: Term) -> Term:
        """An array that holds `term` everywhere."""
        sort = self.terms.mk_array_sort(self.terms.mk_bv_sort(index), self.terms.mk_bv_sort(width))
        return self.terms.mk_const_array(sort, term)

    def apply(self, node: Node, args: Sequence[Term]) -> Term:
        """The term of a node, see `system.Node`, of the terms `args`."""
        kind, op = self._of.Kind, node.op
        if op == "same":
            return self._same(node.numbers[0], args)
        own = getattr(kind, _KINDS.get(op, f"BV_{op.upper()}"), None)
        if op in COMPARED:
            if op == "implies":
                args = [self.holds(arg) for arg in args]
            truth = self.terms.mk_term(own, args)
            return self.terms.mk_term(kind.ITE, [truth, self._one, self._zero])
        if op == "ite":
            return self.terms.mk_term(kind.ITE, [self.holds(args[0]), *args[1:]])
        if op == "slice":
            return self.terms.mk_term(kind.BV_EXTRACT, args, list(node.numbers))
        if op in ("uext", "sext"):
            more = node.width - node.numbers[0]
            extend = kind.BV_ZERO_EXTEND if op == "uext" else kind.BV_SIGN_EXTEND
            return self.terms.mk_term(extend, args, [more]) if more else args[0]
        if op in ("sll", "srl", "sra"):
            args = [args[0], self.resized(args[1], node.width)]
        return self.terms.mk_term(own, args)

    def _same(self, index, arrays):
        """One bit: word by word, since Bitwuzla does not compare arrays that begin with one word everywhere."""
        kind, same = self._of.Kind, self._one
        for place in range(1 << index):
            at = self.value(place, index)
            words = [self.terms.mk_term(kind.ARRAY_SELECT, [array, at]) for array in arrays]
            same = self.terms.mk_term(kind.BV_AND, [same, self.terms.mk_term(kind.BV_COMP, words)])
        return same

    def resized(self, term: Term, width: int) -> Term:
        """A word in more bits; of a shift's amount fewer are never asked for."""
        more = width - term.sort().bv_size()
        return self.terms.mk_term(self._of.Kind.BV_ZERO_EXTEND, [term], [more]) if more > 0 else term

    def holds(self, term: Term) -> Term:
        """The truth of one bit."""
        return self.terms.mk_term(self._of.Kind.EQUAL, [term, self._one])

    def equal(self, term: Term, number: int) -> Term:
        """The truth that a word is a number."""
        return self.terms.mk_term(self._of.Kind.EQUAL, [term, self.value(number, term.sort().bv_size())])

    def at_most(self, term: Term, number: int) -> Term:
        """The truth that a word is at most a number."""
        return self.terms.mk_term(self._of.Kind.BV_ULE, [term, self.value(number, term.sort().bv_size())])

    def at_least(self, term: Term, number: int) -> Term:
        """The truth that a word is at least a number."""
        return self.terms.mk_term(self._of.Kind.BV_UGE, [term, self.value(number, term.sort().bv_size())])

    def negated(self, truth: Term) -> Term:
        """The truth that another is none."""
        return self.terms.mk_term(self._of.Kind.NOT, [truth])

    def all_of(self, truths: Sequence[Term]) -> Term:
        """The truth of all."""
        return reduce(lambda *pair: self.terms.mk_term(self._of.Kind.AND, [*pair]), truths, self.terms.mk_true())

    def any_of(self, truths: Sequence[Term]) -> Term:
        """The truth of one at least."""
        return self.negated(self.all_of([self.negated(truth) for truth in truths]))

    def total(self, products: Sequence[Sequence[tuple[Term, int]]], width: int) -> Term:
        """A word of `width` bits: the sum over `products`, lists of ``(term or number, number to add)``, of their
        products; where it does not fit, the largest word. No factor may be wider."""
        sums = (self.value(0, width), 0)
        for factors in products:
            numbers = [term + more for term, more in factors if isinstance(term, int)]
            product = self._bounded(math.prod(numbers), width)
            for term, more in factors:
                if not isinstance(term, int):
                    most = (1 << term.sort().bv_size()) - 1 + more
                    word = self.resized(term, width)
                    if more:
                        word = self.terms.mk_term(self._of.Kind.BV_ADD, [word, self.value(more, width)])
                    product = self._saturated("MUL", product, (word, most), width)
            sums = self._saturated("ADD", sums, product, width)
        return sums[0]

    def _bounded(self, number, width):
        number = min(number, (1 << width) - 1)
        return self.value(number, width), number

    def _saturated(self, op, one, other, width):
        """``(word, the most it can be)`` of two such; the largest word in place of what does not fit."""
        kind, full = self._of.Kind, (1 << width) - 1
        (left, most), (right, more) = one, other
        word = self.terms.mk_term(getattr(kind, f"BV_{op}"), [left, right])
        most = most * more if op == "MUL" else most + more
        if most <= full:
            return word, most
        over = self.terms.mk_term(getattr(kind, f"BV_U{op}_OVERFLOW"), [left, right])
        return self.terms.mk_term(kind.ITE, [over, self.value(full, width), word]), full

    def require(self, truth: Term) -> None:
        """From now on this holds."""
        self._solver.assert_formula(truth)

    def check(self, *assumed: Term) -> str:
        """Whether what is required can hold, with what is assumed for this question alone."""
        if perf_counter() > self._deadline:
            return UNKNOWN
        self._taken = assumed
        result = self._solver.check_sat(*assumed)
        return {self._of.Result.SAT: SAT, self._of.Result.UNSAT: UNSAT}.get(result, UNKNOWN)

    def found(self, term: Term) -> int:
        """The number of a word in the answer to the last question."""
        return int(self._solver.get_value(term).value(10))

    def blamed(self) -> list[int]:
        """Which of the last question's assumptions, by their places, cannot hold together."""
        wrong = {term.id() for term in self._solver.get_unsat_assumptions()}
        return [place for place, term in enumerate(self._taken) if term.id() in wrong]
