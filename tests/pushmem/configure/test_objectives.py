"""Layers: what is made least is exact, whatever the words are, and time may end in any of them."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras
from helpers.systems import Builder
from tilewright.pushmem.configure import query
from tilewright.pushmem.configure.example import Example
from tilewright.pushmem.configure.objectives import Choice, Choices, Least
from tilewright.pushmem.configure.solve import SAT, UNKNOWN, Solver

extras.need("bitwuzla")


def words(*widths):
    """A builder of a system whose outputs ``w0`` ... are the words ``c0`` ... of its configuration."""
    b = Builder("words")
    for place, width in enumerate(widths):
        b.output(f"w{place}", b.parameter(f"c{place}", width))
    return b


def at_least(bounds, width=16):
    """A system and an example in which each word ``c0`` ... is at least so much."""
    b = Builder("bounds")
    for place, bound in enumerate(bounds):
        word = b.parameter(f"c{place}", width)
        b.output(f"w{place}", word)
        b.output(f"below{place}", word.below(bound))
    return b.system, Example(1, {}, {f"below{place}": [0] for place in range(len(bounds))})


@settings(max_examples=150, deadline=None)
@given(
    st.integers(5, 12),
    st.lists(
        st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3), st.booleans()), min_size=1, max_size=4), max_size=4
    ),
)
def test_a_sum_of_products_never_wraps(width, products):
    solver, terms = Solver(), []
    for number, factors in enumerate(products):
        row = []
        for place, (value, more, known) in enumerate(factors):
            word = value
            if not known:
                word = solver.unknown(f"{number}.{place}", 4)
                solver.require(solver.equal(word, value))
            row.append((word, more))
        terms.append(row)
    total = solver.total(terms, width)
    assert solver.check() == SAT
    exact = sum(math.prod(value + more for value, more, _ in factors) for factors in products)
    assert solver.found(total) == min(exact, (1 << width) - 1)


def test_products_of_many_bits_are_least():
    # 40,000 to the third power has 46 bits, and the largest three words have 48.
    system, example = at_least([40000, 40001, 40002])
    layer = Least("product", [[(f"c{place}", 0) for place in range(3)]])
    answer = query.solve(system, example, layers=[layer])
    assert answer.layers == {"product": 40000 * 40001 * 40002}


def test_layers_are_least_one_after_the_other():
    b = Builder("sum")
    b.output("sum", b.parameter("c0", 4) + b.parameter("c1", 4))
    layers = [Least("first", [[("c0", 0)]]), Least("second", [[("c1", 0)]])]
    example = Example(1, {}, {"sum": [3]})
    assert query.solve(b.system, example, layers=layers).registers == {"c0": 0, "c1": 3}
    assert query.solve(b.system, example, layers=layers[::-1]).layers == {"second": 0, "first": 3}


def test_the_cheapest_choices_that_have_an_answer_are_taken():
    b = words(4, 4)
    example = Example(1, {}, {"w0": [5], "w1": [0]})
    groups = [
        [Choice(0, {f"c{place}": 0}, {}), Choice(3, {}, {f"c{place}": 1}), Choice(2, {f"c{place}": 6}, {})]
        for place in range(2)
    ]
    answer = query.solve(b.system, example, layers=[Choices("cost", groups)])
    assert answer.layers == {"cost": 3} and answer.registers == {"c0": 5, "c1": 0}
    costs = [cost for cost, _ in Choices("cost", groups).combinations()]
    assert costs == sorted(sum(pair) for pair in itertools.product((0, 3, 2), repeat=2))


def test_the_first_choices_come_before_all_are_listed():
    groups = [[Choice(cost, {f"c{place}": cost}, {}) for cost in range(7)] for place in range(12)]
    first = [cost for cost, _ in itertools.islice(Choices("cost", groups).combinations(), 14)]
    assert first == [0, *[1] * 12, 2]


def test_choices_never_change_what_is_known():
    b = words(4)
    layer = Choices("cost", [[Choice(0, {"c0": 5}, {}), Choice(1, {}, {})]])
    answer = query.solve(b.system, Example(1, {}, {"w0": [None]}), layers=[layer], fixed={"c0": 7})
    assert answer.layers == {"cost": 1} and answer.registers == {"c0": 7}


def test_no_time_is_unknown_and_never_infeasible():
    system, example = at_least([9])
    assert query.solve(system, example, limit_s=0.0).verdict == query.GAVE_UP
    # There is no answer, but nobody has the time to see it.
    refuted = Example(1, {}, {"below0": [0], "w0": [1]})
    assert query.solve(system, refuted, limit_s=0.0, fixed={"c0": 2}).verdict == query.GAVE_UP
    assert query.solve(system, refuted, fixed={"c0": 2}).verdict == query.INFEASIBLE


def test_a_question_that_is_too_hard_ends_in_time():
    # A prime: that it has no factors takes long to prove.
    b = Builder("factors")
    one, other = (b.parameter(name, 32).extended(64) for name in "pq")
    b.output("product", b.apply("mul", one, other))
    b.output("small", one.below(2) | other.below(2))
    example = Example(1, {}, {"product": [(1 << 61) - 1], "small": [0]})
    answer = query.solve(b.system, example, limit_s=0.5)
    assert answer.verdict == query.GAVE_UP and 0.4 < answer.seconds["first"] < 5


@pytest.mark.parametrize("left", [1, 2, 3])
def test_time_that_ends_in_a_layer_leaves_an_answer_that_says_so(monkeypatch, left):
    system, example = at_least([9, 11])
    layers = [Least("first", [[("c0", 0)]]), Least("second", [[("c1", 0)]])]
    asked, check = [], Solver.check

    def ends(solver, *assumed):
        asked.append(1)
        return check(solver, *assumed) if len(asked) <= left else UNKNOWN

    monkeypatch.setattr(Solver, "check", ends)
    answer = query.solve(system, example, layers=layers)
    assert answer.verdict == query.SOLVED and not answer.complete and answer.replayed == 1
    assert "second" not in answer.layers and answer.registers["c0"] >= 9
