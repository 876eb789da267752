"""Budgets of slices for each head in T5: rows by chooser, and what tables and claims make of them."""

import math

import pytest
import torch
from test_claims import verdicts
from test_figures import configured

from helpers import synthetic
from helpers.checkout import merged
from helpers.rows import whole
from helpers.threads import threads
from tilewright.core.errors import ConfigError, SolverUnavailableError
from tilewright.integrations import tuning
from tilewright.slices.budgets import choice
from tilewright_study import config, experiments
from tilewright_study.experiments import budgets
from tilewright_study.experiments.budgets import run as _budgets
from tilewright_study.experiments.budgets import table_budgets
from tilewright_study.measure.effort import Run
from tilewright_study.measure.weights import Weights

QUICK = Run(rse=1.0, min_repetitions=3)


def settings(**changes):
    stated = {
        **{"order": "hilbert", "shares": (0.1, 0.3, 0.6), "keeps": (0.3,), "choosers": ("single", "highs", "mass")},
        **{"steps": 2, "parts": 2, "rows": 64, "max_seconds": 0.01, "weights": None},
    }
    return budgets.Settings(**stated | changes)


@pytest.fixture(autouse=True)
def maps(monkeypatch):
    """Half of the heads attend to few keys, half to many; planted maps take seconds."""

    def planted(heads, head_dim, grid, order, seed, place, dtype):
        q, k, v = torch.randn(3, 1, heads, math.prod(grid), head_dim, generator=torch.Generator().manual_seed(seed))
        # Queries of a group are alike.
        sharp = torch.tensor([2.0, 0.5]).repeat(heads)[:heads, None, None]
        q, v = q[:, :, ::64].repeat_interleave(64, 2) * sharp, v / sharp**2
        return tuning.Pass(0, tuple(grid), lambda attend: attend(0, q, k, v))

    monkeypatch.setattr(_budgets, "_planted", planted)
    with threads(1):
        yield


def test_rows_of_planted_maps():
    planted = whole("budgets", _budgets.run("4x64-4x8x16", settings(shares=(0.15, 0.3, 0.6)), QUICK))
    dense, single, program, mass = planted
    assert [row["chosen_by"] for row in planted] == ["dense", "single", "highs", "mass"]
    assert all(row["status"] == "ok" and row["p50_us"] > 0 and row["relative_error"] < 1e-4 for row in planted)
    assert dense["error"] == 0 and dense["recall"] == 1
    for row in (single, program):
        assert row["run_us"] <= row["limit_us"] * (1 + choice.SLACK) and row["solve_s"] > 0
        assert row["error"] == pytest.approx(row["predicted_error"], rel=0.3)
    assert program["predicted_error"] <= single["predicted_error"] and program["solution"] == "optimal"
    # Heads of mixed kinds.
    assert program["error"] < single["error"]
    assert mass["density"] == pytest.approx(0.3, abs=0.02) and mass["error"] > 0


def test_a_network_without_weights_and_a_solver_without_a_licence_are_told(monkeypatch, tmp_path):
    lacking = Weights(network="wan-tiny-480p-5f", options={"layers": 1}, path=str(tmp_path / "none"), recipe=None)
    (row,) = whole("budgets", _budgets.run("tiny-2x12x12", settings(weights=lacking), QUICK))
    assert row["status"] == "skipped" and "no weights" in row["reason"] and row["grid"] == "2x12x12"

    def refuse(*_):
        raise SolverUnavailableError("no licence")

    monkeypatch.setattr(choice, "choose", refuse)
    skipped, dense = whole("budgets", _budgets.run("1x64-4x8x16", settings(choosers=("gurobi",)), QUICK))
    assert (skipped["status"], skipped["reason"], dense["status"]) == ("skipped", "no licence", "ok")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": [0.3, 0.1]}, "budgets.shares: expected shares above 0, at most 1, that ascend, found"),
        ({"keeps": [0.01]}, "budgets.keeps: expected shares from 0.05 to 0.6"),
        (
            {"choosers": ["magic"]},
            "budgets.choosers: unknown chooser 'magic'; known: highs, gurobi, greedy, single, mass",
        ),
        ({"parts": 9}, "budgets.parts: expected 1 to 4, found 9"),
        (
            {"networks": {"other": [[2, 3, 4]]}},
            "budgets.networks: unknown weights of video.weights 'other'; known: tiny",
        ),
    ],
)
def test_bad_settings_are_refused(changes, message):
    stated = merged("config/all.yaml") | {"experiments": ["budgets"]}
    with pytest.raises(ConfigError, match=f"^{message}"):
        config.load(stated | {"budgets": stated["budgets"] | changes})


@pytest.mark.parametrize(
    ("claim", "value"),
    [("budgets_less:planted/0.2", 30), ("budgets_faster:trained/0.2", 1 / 0.7), ("budgets_passed:", 100)],
)
def test_claims_compare_the_program_with_a_single_share(claim, value, tmp_path):
    study = configured(experiments=["budgets"])
    synthetic.write_budgets(tmp_path, study)
    files = sorted((tmp_path / "results/logs/budgets").glob("*.csv"))
    assert len(files) == len(experiments.cases("budgets", study)) == 2
    frame = table_budgets.table(files)
    assert frame.loc[frame["chosen_by"] == "highs", "less"].round(6).eq(0.3).all()
    assert (frame.loc[frame["keep"] == 0.2, "speedup"].dropna() == 5).all()
    row = verdicts(tmp_path, files, id=claim).iloc[0]
    assert row["measured"] == pytest.approx(value, rel=0.05)
