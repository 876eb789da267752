"""Shares of the keys for each head: the choice against brute force, the table and its file, and steps that read it."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.slices import qkv
from helpers.solvers import need
from tilewright import slices
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, SolverUnavailableError
from tilewright.slices import budgets
from tilewright.slices.budgets import choice, measured


@st.composite
def instances(draw):
    """Errors, times and a limit. Whole numbers: many choices take the same time."""
    heads, shares = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 9), min_size=heads * shares, max_size=heads * shares)
    errors, us = (np.reshape(draw(numbers), (heads, shares)).astype(float) for _ in range(2))
    us = us.cumsum(1)
    return errors, us, float(draw(st.integers(int(us.min(1).sum()), int(us.sum() + 1))))


def totals(errors, us, limit):
    """Errors of all choices that meet a limit, and of those that are one share for all."""
    heads, shares = errors.shape
    met = [
        chosen for chosen in itertools.product(range(shares), repeat=heads) if us[range(heads), chosen].sum() <= limit
    ]
    every = {chosen: errors[range(heads), chosen].sum() for chosen in met}
    return every, [error for chosen, error in every.items() if len(set(chosen)) == 1]


@pytest.mark.parametrize("solver", choice.NAMES)
@settings(max_examples=25, deadline=None)
@given(instances())
def test_a_choice_takes_no_more_time_than_allowed_and_loses_no_more_than_one_share_for_all(solver, instance):
    need(solver)
    _, us, limit = instance
    every, alike = totals(*instance)
    if solver == "single" and not alike:
        with pytest.raises(ConfigError, match=r"^limit: expected one that a single share for all heads meets, found "):
            choice.choose(*instance, solver)
        return
    found = choice.choose(*instance, solver)
    assert choice.violations(found.chosen, *instance) == []
    assert found.us == us[range(len(us)), found.chosen].sum() <= limit
    assert found.error == every[tuple(found.chosen)] <= min(alike, default=np.inf)
    if solver == "single":
        assert found.error == min(alike)
    if solver in ("highs", "gurobi"):
        assert found.error == min(every.values()) and found.status == "optimal"


def test_the_program_beats_one_share_where_heads_differ():
    # One head needs many keys, two need few: of the time of the middle share, the first gets what the others spare.
    errors, us = np.array([[9, 4, 0], [1, 0, 0], [1, 0, 0]], float), np.tile([1.0, 2.0, 3.0], (3, 1))
    assert choice.choose(errors, us, 6.0, "single").error == 4
    found = choice.choose(errors.reshape(1, 3, 3), us.reshape(1, 3, 3), 6.0)
    assert found.error == 1 and found.us == 6 and sorted(found.chosen[0, 1:]) == [0, 1] and found.chosen[0, 0] == 2


def test_the_checker_knows_no_solver():
    errors, us = np.zeros((2, 3)), np.tile([1.0, 2.0, 3.0], (2, 1))
    for chosen, expected in (
        (np.array([2, 1]), []),
        (np.array([2, 2]), ["expected at most 5 us, found 6"]),
        (np.array([0, 3]), ["expected numbers of 3 shares, found 0 to 3"]),
        (np.array([-1, 0]), ["expected numbers of 3 shares, found -1 to 0"]),
        (np.array([0.0, 1.0]), ["expected integers of shape (2,), found float64 of (2,)"]),
        (np.array([0]), ["expected integers of shape (2,), found int64 of (1,)"]),
    ):
        assert choice.violations(chosen, errors, us, 5.0) == expected


def test_a_choice_of_bad_numbers_is_refused():
    good = np.ones((2, 3))
    for errors, us, limit, message in (
        (good, good, 1.0, "limit: expected at least the 2 us of the smallest shares, found 1"),
        (good, good, np.nan, "limit: expected at least the 2 us of the smallest shares, found nan"),
        (good * np.nan, good, 9.0, r"errors, times: expected finite numbers of one shape, found \(2, 3\) and \(2, 3\)"),
        (good, np.ones((3, 2)), 9.0, r"errors, times: .*, found \(2, 3\) and \(3, 2\)"),
        (-good, good, 9.0, "errors, times: expected numbers of at least 0, found less"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            choice.choose(errors, us, limit)


def test_a_program_that_a_licence_is_too_small_for_is_refused_by_name():
    need("gurobi")
    large = np.ones((700, 3))
    with pytest.raises(SolverUnavailableError, match=r"2,?100 variables"):
        choice.choose(large, large, 9e9, "gurobi")


TABLE = budgets.Budgets("wan", (16, 2, 20, 30), 300, 8, (0, 4), (((0.5, 0.1), (0.2, 0.2)), ((0.1, 0.3), (0.5, 0.5))))


def test_a_table_comes_back_from_its_file(tmp_path):
    path = tmp_path / "table.json"
    TABLE.save(path, {"solver": "highs"})
    assert budgets.Budgets.load(path) == TABLE
    assert [TABLE.of(step, 0) for step in (0, 3, 4, 7)] == [(0.5, 0.1)] * 2 + [(0.1, 0.3)] * 2
    assert budgets.parts(8, 3) == (0, 2, 5)
    text = path.read_text()
    for old, new, message in (
        ('"version": 1', '"version": 2', "expected"),
        ("slice budgets", "profile", "expected kind 'slice budgets', found 'profile'"),
        ('"steps": 8', '"steps": 4', r"found another content: begins: expected steps that .* below 4, found \(0, 4\)"),
        ("0.3", "1.3", "found another content: Expected `float` <= 1.0"),
        ('"tokens"', '"words"', "found another content: Object contains unknown field `words`"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ArtifactError, match=message) as error:
            budgets.Budgets.load(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begins": (1, 4)}, "begins: expected steps that ascend from 0 to below 8, found (1, 4)"),
        ({"begins": (0,)}, "keep: expected the same layers and heads in 1 parts, found others"),
        ({"keep": (((0.5,),), ((0.5,), (0.5,)))}, "keep: expected the same layers and heads in 2 parts, found others"),
        ({"keep": ((), ())}, "keep: expected as many heads, one at least, in each layer, found others"),
        ({"keep": (((0.5,), (0.5, 0.1)),) * 2}, "keep: expected as many heads, one at least, in each layer, found"),
    ],
)
def test_a_table_holds_together(changes, message):
    stated = {name: getattr(TABLE, name) for name in TABLE.__struct_fields__} | changes
    with pytest.raises(PatternError, match=f"^{re.escape(message)}"):
        budgets.Budgets(**stated)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"model": "other"}, "expected model 'wan', found 'other'"),
        ({"shape": [16, 2, 20, 40]}, "expected shape (16, 2, 20, 30), found [16, 2, 20, 40]"),
        ({"steps": 50}, "expected steps 8, found 50"),
        ({"layers": 30}, "expected layers 2, found 30"),
    ],
)
def test_a_table_of_another_model_or_run_is_refused(found, message):
    TABLE.check(model="wan", shape=[16, 2, 20, 30], steps=8, layers=2, heads=2, tokens=300)
    with pytest.raises(PatternError, match=f"^budgets of wan: {re.escape(message)}$"):
        TABLE.check(**found)


def test_steps_predict_the_shares_of_their_table(device, tmp_path):
    TABLE.save(tmp_path / "table.json")
    q, k, v = qkv(1, 2, 300, 300, 64, device=device)
    steps = slices.Steps(refresh=(0, 5), first_dense=0, budgets=tmp_path / "table.json", rows=32, least=0)
    for step, layer, keep in ((0, 0, (0.5, 0.1)), (4, 0, (0.5, 0.1)), (0, 1, (0.2, 0.2)), (5, 0, (0.1, 0.3))):
        out = steps(layer, step, "cond", q, k, v)
        lists = slices.predict(q, k, keep=keep, budget=max(keep), rows=32, least=0)
        assert torch.equal(steps.lists(layer, step, "cond").counts, lists.counts)
        assert torch.equal(out, slices.attend(q, k, v, lists))
    assert lists.counts[0, :, 0].tolist() == [30, 90]


def test_steps_refuse_calls_that_their_table_is_not_for(device):
    steps = slices.Steps(refresh=(0, 5), first_dense=0, budgets=TABLE)
    q, other = torch.zeros(1, 2, 300, 64, device=device), torch.zeros(1, 3, 300, 64, device=device)
    for layer, step, x, message in (
        (2, 0, q, "expected layers 2, found 3"),
        (0, 8, q, "expected steps 8, found 9"),
        (0, 0, other, "expected heads 2, found 3"),
        (0, 0, q[:, :, :200], "expected tokens 300, found 200"),
    ):
        with pytest.raises(PatternError, match=f"^budgets of wan: {message}$"):
            steps(layer, step, "cond", x, x, x)
    with pytest.raises(PatternError, match=r"^budgets: expected a table in place of budget, keep, found both$"):
        slices.Steps(budgets=TABLE, keep=0.5, budget=0.5)
    with pytest.raises(PatternError, match=r"^refresh: expected a step in each part of the table, found none in that"):
        slices.Steps(refresh=(0, 3), budgets=TABLE)


def test_losses_are_those_of_lists_against_dense_attention(device):
    q, k, v = qkv(2, 2, 100, 80, 64, device=device)
    dense, lse = slices.dense(q, k, v)
    found = measured.losses(q, k, v, dense, lse, (0.2, 1.0), rows=32, least=0)
    lists = slices.predict(q, k, keep=0.2, budget=0.2, rows=32, least=0)
    off = (slices.attend(q, k, v, lists) - dense).double().transpose(0, 1).flatten(1).norm(dim=1) ** 2
    expected = off / dense.double().transpose(0, 1).flatten(1).norm(dim=1) ** 2
    np.testing.assert_allclose(found.error[:, 0], expected.cpu().numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.recall[:, 0], slices.recall(q, k, lists).mean((0, 2)).cpu().numpy(), rtol=1e-4)
    assert (found.error[:, 1] < 1e-10).all() and (found.recall[:, 1] > 1 - 1e-5).all()
    us = measured.times(q, k, v, (0.2, 0.5, 1.0), rows=32, least=0)
    assert us.shape == (3,) and (np.diff(us) > 0).all() and (us >= 0).all()
