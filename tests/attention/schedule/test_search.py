"""A schedule of several tiles is taken only where profiles say that it is surely faster than one alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from helpers.factories import make_blocks, make_limits, make_profile, random_inputs
from tilewright.attention import plan
from tilewright.attention.schedule import search, solve
from tilewright.core.errors import InfeasibleError

TILES = ("4x1", "2x1", "4x8")


def known_to(share, profiles):
    """`profiles` whose latencies have quintiles that lie this share of them apart."""

    def changed(shape):
        return replace(shape, p20_us=shape.latency_us * (1 - share / 2), p80_us=shape.latency_us * (1 + share / 2))

    return {name: replace(each, shapes=tuple(map(changed, each.shapes))) for name, each in profiles.items()}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_regions=st.integers(1, 10),
    share=st.sampled_from([0.0, 0.05, 0.3]),
    kappa=st.integers(1, 3),
    solver=st.sampled_from(["highs", "descent"]),
)
def test_several_tiles_are_faster_by_more_than_profiles_are_off(seed, n_regions, share, kappa, solver):
    blocks, profiles = random_inputs(seed, n_regions, TILES, most_runs=4)
    profiles, limits = known_to(share, profiles), make_limits(rounds=2, max_tile_kinds=kappa, round_us=0.3)

    alone = (solve({name: blocks[name]}, {name: profiles[name]}, limits, "greedy") for name in TILES)
    least = min(each.predicted_us for each in alone)
    free, found = (solve(blocks, profiles, limits, solver, doubted=doubted) for doubted in (False, True))
    greedy = solve(blocks, profiles, limits, "greedy", doubted=True)
    assert greedy.predicted_us == solve(blocks, profiles, limits, "greedy").predicted_us
    if len(np.unique(found.tile)) > 1:
        assert found.predicted_us == free.predicted_us < least * (1 - share) and not found.note.count("alone")
    else:
        assert found.predicted_us == pytest.approx(least)
        assert free.predicted_us >= least * (1 - share) * (1 - 1e-12)
    # Never slower than greedy or a tile alone, but for what cannot be told.
    assert found.predicted_us <= min(least, greedy.predicted_us / (1 - share)) * (1 + 1e-12)
    assert found.bound_us <= found.predicted_us


def halves(gain):
    """Two tiles, of which each takes the share `gain` less for its half of the regions."""
    blocks = {name: make_blocks(name, [[1], [2]] * 8) for name in ("4x1", "4x16")}
    runs = {"4x1": 1, "4x16": 2}

    def latency(name):
        return lambda rows, length, masked: 100.0 * (1 - gain * (length == runs[name]))

    return blocks, {name: make_profile(each, latency=latency(name), launch_us=0.0) for name, each in blocks.items()}


@pytest.mark.parametrize("gain, share, tiles", [(0.2, 0.05, 2), (0.2, 0.15, 1), (0.0, 0.0, 1), (0.02, 0.0, 2)])
def test_a_gain_is_taken_if_profiles_know_it(gain, share, tiles):
    blocks, profiles = halves(gain)
    profiles = known_to(share, profiles)
    found = solve(blocks, profiles, make_limits(), "descent", doubted=True)
    assert len(np.unique(found.tile)) == tiles
    if share and tiles == 1:
        # Half of the load is faster by `gain`, and the other half is in both.
        assert found.note == f"4x1 alone: several are predicted {0.1 / 0.9:.1%} faster, known to {share:.1%}"
        assert found.status == "heuristic" and found.gap > 0


def test_the_published_objective_is_left_as_it_is():
    blocks, profiles = halves(0.2)
    profiles = known_to(0.5, profiles)
    found = solve(blocks, profiles, make_limits(), "highs-paper", doubted=True)
    assert len(np.unique(found.tile)) == 2


def test_one_tile_alone_that_does_not_fit_is_no_choice(monkeypatch):
    blocks, profiles = halves(0.2)
    monkeypatch.setattr(search.descent.greedy, "assign", lambda problem: (_ for _ in ()).throw(InfeasibleError("no")))
    problem = search.build(blocks, known_to(0.5, profiles), make_limits())
    choice = np.arange(problem.n_regions) % 2, np.zeros(problem.n_regions, np.int64)
    assert search._doubted(problem, profiles, choice) == (choice, {})


def test_plans_doubt_their_profiles(monkeypatch):
    asked, solver = [], plan.schedule.solve
    monkeypatch.setattr(plan.schedule, "solve", lambda *args, **given: asked.append(given) or solver(*args, **given))
    tw.plan(np.tri(40, dtype=bool), heads=1, head_dim=16, tiles=("16x1", "32x1"))
    assert asked[-1]["doubted"] and asked[-1]["solver"] == "highs"
