"""The fastest of a few schedules: what is tried, that it is checked, and that the device's own clock decides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import plans
from helpers.factories import random_inputs
from tilewright import devices
from tilewright.attention import schedule, tuning
from tilewright.attention.cpu import executor as cpu_executor
from tilewright.attention.masks import Bias
from tilewright.attention.schedule import TUNED
from tilewright.core.errors import ArtifactError, PatternError
from tilewright.core.timing import Timing

SIZES = {"heads": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
NAMES = ("16x1", "32x1", "8x8")


@pytest.fixture(scope="module")
def ordered():
    return plans.reordered(plans.pattern(140, 90))


@pytest.fixture(scope="module")
def cover(ordered):
    return plans.covers(ordered, NAMES)


@pytest.fixture
def candidates(cover):
    """A schedule of all tiles, and one of each alone."""
    alone = [replace(plans.scheduled({name: cover[name]}), predicted_us=2.0) for name in NAMES]
    return [plans.scheduled(cover, split_keys=32), *alone]


def timed(monkeypatch, medians):
    """Let the device take `medians`, microseconds, in the order in which schedules are timed."""

    def in_turns(calls, **_):
        for call in calls:
            call()
        return [Timing(us, us, us, 5, 0.01) for us in medians[: len(calls)]]

    monkeypatch.setattr(tuning, "time_in_turns", in_turns)


def test_the_fastest_is_taken_and_says_what_was_tried(monkeypatch, ordered, cover, candidates, tmp_path):
    timed(monkeypatch, [40.0, 30.0, 10.0, 20.0])
    found = tuning.fastest(candidates, cover, ordered, **SIZES)
    assert found.solver == TUNED and found.tiles == ("32x1",) and found.tuned_s > 0
    assert np.array_equal(found.block, candidates[2].block) and found.predicted_us == 2.0
    assert [(trial.tiles, trial.solver, trial.p50_us) for trial in found.trials] == [
        (NAMES, "greedy", 40.0), (NAMES[:1], "greedy", 30.0), (NAMES[1:2], "greedy", 10.0), (NAMES[2:], "greedy", 20.0),
    ]  # fmt: skip
    assert found.chosen == "32x1 greedy" and found.summary()["chosen"] == found.chosen
    assert candidates[0].chosen == ""
    schedule.save(tmp_path / "s.json", found)
    read = schedule.load(tmp_path / "s.json")
    assert (read.trials, read.tuned_s, read.chosen) == (found.trials, found.tuned_s, found.chosen)
    schedule.verify_inputs(read, cover)


@settings(deadline=None, max_examples=20)
@given(st.permutations([10.0, 20.0, 30.0, 40.0]))
def test_no_trial_was_faster_than_what_is_taken(medians):
    with pytest.MonkeyPatch.context() as patch:
        timed(patch, medians)
        graph = plans.reordered(plans.pattern(40, 40))
        cover = plans.covers(graph, NAMES)
        alone = [plans.scheduled({name: cover[name]}) for name in NAMES]
        found = tuning.fastest([plans.scheduled(cover), *alone], cover, graph, **SIZES)
    assert min(trial.p50_us for trial in found.trials) == 10.0
    index = medians.index(10.0)
    assert found.tiles == (NAMES if index == 0 else NAMES[index - 1 : index])


def test_what_is_wrong_is_not_taken(monkeypatch, ordered, cover, candidates):
    timed(monkeypatch, [5.0, 6.0])
    right = cpu_executor.Executor.__call__
    prepare = cpu_executor.prepare

    def faulty(found, blocks, **options):
        if found.tiles == ("16x1",):
            raise PatternError("no such kernel")
        return prepare(found, blocks, **options)

    def call(self, *qkv):
        # The second schedule that is right by itself misses one row.
        out = right(self, *qkv)
        calls.append(self)
        return torch.where(torch.arange(out.shape[2])[:, None] == 7, 0.5, out) if calls[1:2] == [self] else out

    calls = []
    monkeypatch.setattr(cpu_executor, "prepare", faulty)
    monkeypatch.setattr(cpu_executor.Executor, "__call__", call)
    found = tuning.fastest(candidates, cover, ordered, **SIZES)
    reasons = [trial.reason for trial in found.trials]
    assert reasons[1] == "PatternError: no such kernel" and reasons[2].startswith("relative error")
    assert [trial.p50_us for trial in found.trials] == [5.0, None, None, 6.0] and found.tiles == NAMES


def test_without_any_that_is_right_there_is_an_error(monkeypatch, ordered, cover, candidates):
    right = cpu_executor.Executor.__call__
    monkeypatch.setattr(cpu_executor.Executor, "__call__", lambda self, *qkv: right(self, *qkv) * torch.nan)
    with pytest.raises(ArtifactError, match="expected a schedule that runs, found: relative error nan, tolerance"):
        tuning.fastest(candidates, cover, ordered, **SIZES)


def test_equal_work_is_tried_once(monkeypatch, ordered, cover):
    timed(monkeypatch, [5.0])
    alone = plans.scheduled({"16x1": cover["16x1"]})
    # The same items, named by a set of tiles of which it uses one.
    other = replace(alone, tiles=("32x1", "16x1"), tile=alone.tile + 1, blocks_ids=(cover["32x1"].id, cover["16x1"].id))
    found = tuning.fastest(
        [replace(other, solver="highs", start_us=other.start_us + 1), alone], cover, ordered, **SIZES
    )
    assert [(trial.tiles, trial.solver) for trial in found.trials] == [(("16x1",), "highs")]
    assert tuning._work(alone) == tuning._work(other)


def test_a_bias_is_part_of_the_check(monkeypatch, ordered, cover, candidates):
    """Of the order that the pattern has now, and for pairs that it allows alone."""
    timed(monkeypatch, [4.0, 3.0, 2.0, 1.0])
    table = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    bias = Bias(table, lambda rows, cols: abs(rows - cols))
    wide = Bias(torch.cat([table, torch.zeros(2, 200)], 1), bias.index)
    found = tuning.fastest(candidates, cover, ordered, **SIZES, bias=wide, scale=0.3)
    assert not any(trial.reason for trial in found.trials)
    monkeypatch.setattr(tuning, "_added", lambda *_: None)
    with pytest.raises(ArtifactError, match="relative error"):
        tuning.fastest(candidates, cover, ordered, **SIZES, bias=wide, scale=0.3)


def test_finalists_are_the_solvers_answer_greedys_and_the_best_tiles_alone():
    device = devices.describe("cpu")
    names = ("4x1", "4x8", "4x16", "4x32")
    covers, profiles = random_inputs(0, 5, names, device=device)
    limits = devices.limits(device)
    found = schedule.solve(covers, profiles, limits, "descent")
    tried = tuning.finalists(found, covers, profiles, limits)
    assert tried[0] is found and tried[-1].solver == "greedy" and tried[-1].tiles == names
    alone = tried[1:-1]
    assert len(alone) == tuning.FIXED and all(len(each.tiles) == 1 for each in alone)
    every = {n: schedule.solve({n: covers[n]}, {n: profiles[n]}, limits, "greedy").predicted_us for n in names}
    assert [each.tiles[0] for each in alone] == sorted(every, key=every.get)[: tuning.FIXED]
