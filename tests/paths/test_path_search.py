"""The local search of budgets' best paths: never worse than where it begins, and done where no neighbour is better."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.networks.path import Path
from tilewright_study.planning import accuracy, block_sets, latency, program, search

BASES = Path(("11", "111", "1")), Path(("11", "111", "1"), scale=0.5)
BASES = tuple(msgspec.structs.replace(base, levels="123") for base in BASES)
BLOCKS = 6


class Seen:
    """Accuracies of a base, one drawn for each set of blocks."""

    def __init__(self, seed):
        self.of = np.random.default_rng(seed).random(1 << BLOCKS)

    def accuracies(self, skips):
        return self.of[np.asarray(skips) @ (1 << np.arange(BLOCKS))]

    def predict(self, path):
        return float(self.accuracies(block_sets.skips(path)))


def drawn(seed):
    """Times and accuracies of two bases, and forms that know nothing of these."""
    rng = np.random.default_rng(seed)
    pairs = accuracy.pairs_of(BASES[0], "all")
    times = {base: latency.Latency(base, 100.0 * base.scale, rng.integers(1, 12, BLOCKS) * 1.0) for base in BASES}
    forms = [
        accuracy.Losses(base, 0.8, rng.random(BLOCKS) / 9, pairs, rng.normal(0, 0.02, len(pairs)), "all", 1e-3, 0.0)
        for base in BASES
    ]
    seen = {base: Seen((seed, at)) for at, base in enumerate(BASES)}
    return times, forms, seen


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(10, 105), min_size=1, max_size=8, unique=True))
def test_no_neighbour_of_what_is_found_is_better_and_no_plan_is(seed, budgets):
    times, forms, seen = drawn(seed)
    models = [(times[form.base], form) for form in forms]
    plans = [program.plan(models, budgets, solver) for solver in ("highs", "exhaustive")]
    found = search.improved(times, seen, plans)
    assert found.keys() == set(budgets)
    for budget in budgets:
        begun = [plan[budget] for plan in plans if plan[budget] is not None]
        if found[budget] is None:
            assert not begun
            continue
        path, top = found[budget].path, found[budget].accuracy
        own = block_sets.base_of(path)
        assert found[budget].us == pytest.approx(times[own].predict(path)) and found[budget].us <= budget + 1e-6
        assert top == seen[own].predict(path) and found[budget].solver == "searched"
        assert all(top >= seen[block_sets.base_of(each.path)].predict(each.path) for each in begun)
        skips = block_sets.skips(path)
        for count in (1, 2):
            for places in itertools.combinations(range(BLOCKS), count):
                other = skips.copy()
                other[list(places)] ^= True
                near = block_sets.with_skips(own, other)
                assert times[own].predict(near) > budget + 1e-6 or seen[own].predict(near) <= top + 1e-9
        for base in BASES:
            same = block_sets.with_skips(base, skips)
            assert times[base].predict(same) > budget + 1e-6 or seen[base].predict(same) <= top + 1e-9


def test_what_a_program_finds_by_the_same_form_stays():
    times, forms, _ = drawn(3)
    models, budgets = [(times[form.base], form) for form in forms], [30.0, 60.0, 90.0]
    plan = program.plan(models, budgets, "exhaustive")
    found = search.improved(times, {form.base: form for form in forms}, [plan])
    assert {us: found[us].path for us in budgets} == {us: plan[us].path for us in budgets}


def test_a_budget_that_nothing_meets_has_no_path():
    times, _, seen = drawn(0)
    assert search.improved(times, seen, [{1.0: None}]) == {1.0: None}


def test_one_budget_finds_what_another_one_needs():
    """The plan of the small budget is none; a neighbour of the large one's meets it."""
    times, _, seen = drawn(1)
    start = program.Proposal(BASES[0], times[BASES[0]].base_us, 0.0, "highs", 0.0)
    found = search.improved(times, seen, [{times[BASES[0]].base_us: start, 60.0: None}])
    assert found[60.0] is not None and found[60.0].us <= 60.0
