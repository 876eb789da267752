"""The checker sees one deliberately broken schedule for each thing that can be wrong."""

import dataclasses

import numpy as np
import pytest

from helpers.factories import make_limits, random_inputs
from tilewright.attention.schedule import COLUMNS, greedy, solve
from tilewright_study.measure import schedule_check

TILES = ("4x1", "2x1", "4x8")


@pytest.fixture(scope="module")
def case():
    """A right schedule that uses every tile, two kinds in each round, and split blocks: there is something to
    break."""
    blocks, profiles = random_inputs(11, 6, TILES, split_keys=32)
    limits = make_limits(rounds=3, max_tile_kinds=2, round_us=0.1, occupancy=100.0)
    with pytest.MonkeyPatch.context() as patch:
        choice = np.array([0, 1, 2, 1, 0, 1]), np.array([0, 0, 1, 1, 2, 2])
        patch.setattr(greedy, "assign", lambda problem: choice)
        schedule = solve(blocks, profiles, limits, "greedy", "paper")
    assert schedule.split.any() and not schedule.split.all()
    assert schedule_check.violations(schedule, blocks, profiles, limits) == []
    return schedule, blocks, profiles, limits


def edit(schedule, **columns):
    """A copy with some entries replaced: ``column={index: value}``."""
    changes = {}
    for name, entries in columns.items():
        changes[name] = getattr(schedule, name).copy()
        for index, value in entries.items():
            changes[name][index] = value
    return dataclasses.replace(schedule, **changes)


def keep(schedule, indices):
    return dataclasses.replace(schedule, **{name: getattr(schedule, name)[indices] for name in COLUMNS})


def moved(schedule, blocks):
    """One item of a region of several items moved to another round."""
    names = [schedule.tiles[t] for t in schedule.tile]
    region = [int(blocks[n].region[b]) for n, b in zip(names, schedule.block, strict=True)]
    i = next(i for i, r in enumerate(region) if region.count(r) > 1)
    return edit(schedule, round={i: (schedule.round[i] + 1) % 3})


BROKEN = {
    "c1-item-missing": (lambda s, b: keep(s, np.arange(1, s.n_items)), "C1: region"),
    "c1-item-twice": (lambda s, b: keep(s, np.r_[0, np.arange(s.n_items)]), "should follow"),
    "c1-runs-short": (lambda s, b: edit(s, run_hi={0: s.run_hi[0] - 1}), "C1: region"),
    "c1-two-rounds": (moved, "is placed 2 times"),
    "c4-makespan": (lambda s, b: dataclasses.replace(s, predicted_us=s.predicted_us * 0.9), "the record predicts"),
    "c4-objective": (lambda s, b: dataclasses.replace(s, objective_us=s.objective_us * 0.9), "the objective paper is"),
    "c4-bound": (lambda s, b: dataclasses.replace(s, bound_us=s.objective_us * 1.1), "lies above the objective"),
    "c4-round-too-early": (lambda s, b: edit(s, start_us={-1: 0.0}), "starts before round"),
    "lanes-overlap": (
        lambda s, b: edit(s, lane={1: s.lane[0]}, start_us={1: s.start_us[0]}),
        "before item",
    ),
    "lane-outside": (lambda s, b: edit(s, lane={0: 2}), "lane 2 of 2"),
    "rounds-descend": (lambda s, b: keep(s, np.arange(s.n_items)[::-1]), "rounds are not ascending"),
    "round-outside": (lambda s, b: edit(s, round={-1: 7}), "lie outside 0..2"),
    "shape-class": (
        lambda s, b: edit(s, shape={i: 0 for i in range(s.n_items)}),
        "does not fit shape",
    ),
    "split-flag": (lambda s, b: edit(s, split={0: not s.split[0]}), "does not fit shape"),
    "tile-unknown": (lambda s, b: edit(s, tile={0: 9}), "names tile 9 of 3"),
    "block-unknown": (lambda s, b: edit(s, block={0: 999}), "names block 999 of"),
    "class-unknown": (lambda s, b: edit(s, shape={0: 99}), "names shape 99 of"),
    "columns-differ": (lambda s, b: dataclasses.replace(s, lane=s.lane[1:]), "columns differ in length"),
    "tile-without-blocks": (lambda s, b: dataclasses.replace(s, tiles=("4x1", "2x1", "8x8")), "no blocks or profile"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_seen(name, case):
    schedule, blocks, profiles, limits = case
    change, message = BROKEN[name]
    assert any(
        message in line for line in schedule_check.violations(change(schedule, blocks), blocks, profiles, limits)
    )


TIGHTER = {
    "c2-per-block": (lambda s, p: {"per_block": {"registers": 1.0}}, "C2: item"),
    "c3-kappa": (lambda s, p: {"max_tile_kinds": 1}, "C3: round"),
    "c5-envelope": (lambda s, p: {"envelope": {"registers": 5.0}}, "C5: round"),
    "c6-occupancy": (lambda s, p: {"occupancy": 1.0}, "C6: round"),
    "c4-lanes": (lambda s, p: {"lanes": 1}, "C4: the work list takes"),
}


@pytest.mark.parametrize("name", TIGHTER)
def test_a_schedule_of_looser_limits_is_seen(name, case):
    schedule, blocks, profiles, limits = case
    change, message = TIGHTER[name]
    tighter = dataclasses.replace(limits, **change(schedule, profiles))
    assert any(line.startswith(message) for line in schedule_check.violations(schedule, blocks, profiles, tighter))
