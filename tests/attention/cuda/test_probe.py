"""What T3 runs on a GPU: its launches under the interpreter, too; its times where there is a GPU."""

import numpy as np
import pytest
import torch

from helpers import plans
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.gpu import hide_gpu
from tilewright import devices, reference
from tilewright.attention import schedule
from tilewright.attention.blocks import work
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.cuda import probe as cuda_probe
from tilewright.attention.cuda import tile_lists
from tilewright.attention.cuda.tile_lists import Item, Part
from tilewright.attention.measure import measure
from tilewright.attention.schedule import problem
from tilewright.attention.setting import setting
from tilewright.core.errors import DeviceError
from tilewright.core.timing import Timing

H, D = 2, 32
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="times a GPU, and this machine has none")


@pytest.fixture(scope="module")
def ordered():
    return plans.reordered(plans.pattern(100, 200, n_global=2), heads=H, head_dim=D)


@pytest.mark.parametrize("split_keys", [None, 64])
def test_items_that_run_several_times_give_the_same(ordered, split_keys):
    cover = plans.covers(ordered, ["16x1"])["16x1"]
    items = work.items(cover, split_keys)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64)
    thrice = cuda_probe.repeated(lists, 3)
    assert len(thrice.items) == 3 * len(lists.items)
    assert (thrice.parts[:, Part.NUMBER] == np.tile(lists.parts[:, Part.NUMBER], 3)).all()
    tokens = [
        torch.randn(1, H, n, D, generator=torch.Generator().manual_seed(i)) for i, n in enumerate((100, 200, 200))
    ]
    q, k, v = (x.to(DEVICE) for x in tokens)
    out = torch.full_like(q, torch.nan)
    common = setting(cover.shape, H, D, torch.float32)
    cuda_executor.Launch(thrice, cover.tile, common, DEVICE)(q, k, v, out)
    expected = reference.attention(*tokens, torch.from_numpy(ordered.to_dense()))
    written = torch.from_numpy(np.repeat(cover.runs > 0, cover.rows))
    found, right = out.cpu()[:, :, written], expected[:, :, written]
    assert reference.relative_error(found, right) <= reference.TOLERANCE[torch.float32]


@pytest.mark.parametrize("split_keys", [None, 64])
def test_all_items_taken_are_the_same_lists(ordered, split_keys):
    cover = plans.covers(ordered, ["16x1"])["16x1"]
    items = work.items(cover, split_keys)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64)
    everything = tile_lists.subset(lists, slice(None))
    assert (everything.groups, everything.part_rows) == (lists.groups, lists.part_rows)
    assert np.array_equal(np.sort(everything.parts[:, :2], axis=0), np.sort(lists.parts[:, :2], axis=0))
    both = (lists.items[:, Item.PART], everything.items[:, Item.PART])
    assert np.array_equal(both[0] < 0, both[1] < 0)
    for part, again in zip(*(part[part >= 0] for part in both), strict=True):
        assert lists.parts[part, Part.NUMBER] == everything.parts[again, Part.NUMBER]


def test_items_taken_in_turn_write_all_rows(ordered):
    cover = plans.covers(ordered, ["16x1"])["16x1"]
    items = work.items(cover, 64)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64)
    q, k, v = (torch.randn(1, H, n, D, device=DEVICE) for n in (100, 200, 200))
    whole, out = torch.zeros_like(q), torch.zeros_like(q)
    launch = cuda_executor.Launch(lists, cover.tile, setting(cover.shape, H, D, torch.float32), DEVICE)
    launch(q, k, v, whole)
    # The parts of a block stay together, so that they are merged.
    one = lists.items[:, Item.FIRST_ROW] % 32 < 16
    for here in (one, ~one):
        some = launch.with_items(tile_lists.subset(lists, here))
        assert some.lists.groups < lists.groups and len(some.lists.items) == here.sum()
        some(q, k, v, out)
    assert torch.equal(out, whole) and whole.any()


class Clock:
    """A made-up GPU of four multiprocessors: nothing runs, and a launch takes what ``us(steps of its items)`` says."""

    def __init__(self, monkeypatch, us):
        self.us, self.seconds, self.timed = us, [], []
        facts = {
            "multiprocessors": 4,
            "launch_us": 2.0,
            "shared_bytes": 1 << 17,
            "memory_bytes": 1 << 30,
        }
        facts |= {"registers": 1 << 16, "capability": "9.0", "driver": "1.2"}
        self.device = {"kind": "cuda", "name": "Made-up GPU", "versions": {"torch": "2", "triton": "3"}, **facts}
        monkeypatch.setattr(devices, "describe", lambda kind: self.device)
        monkeypatch.setattr(cuda_probe, "DEVICE", "cpu")
        monkeypatch.setattr(cuda_probe, "resources", lambda *of: {"shared_bytes": 1024.0})
        monkeypatch.setattr(cuda_executor.Launch, "__call__", lambda launch, *tokens: self.run(launch.lists))
        monkeypatch.setattr(cuda_probe, "time_gpu", self.time)

    def run(self, lists):
        self.last = lists

    def time(self, call, *, max_seconds, **effort):
        call()
        self.seconds.append(max_seconds)
        us = float(self.us(self.last.items[:, Item.STEPS]))
        self.timed.append((len(self.last.items), us))
        return Timing(0.9 * us, us, 1.1 * us, 10, 0.01, "graph")


def overlapping(steps):
    """Items of different lengths share multiprocessors better than equal ones."""
    return 2.0 + 1.0 + steps.sum() / 4 * (1.0 if len(set(steps.tolist())) == 1 else 0.6)


# By name: what a launch of items with so many steps takes.
CLOCKS = {
    "even": lambda steps: 2.0 + steps.sum() / 4,
    "ramp": lambda steps: 9.0 + steps.sum() / 4,
    "overlapping": overlapping,
    "interfering": lambda steps: 2.0 + steps.sum() * len(set(steps.tolist())) / 4,
    "longest": lambda steps: 2.0 + max(steps.max() * 5.0, steps.sum() / 4),
    "constant": lambda steps: 7.0,
    "launch": lambda steps: 2.0,
}


def profiled(cover, clock, split_keys=64):
    """``(problem, profiles, whole)`` of `cover`, by tile, on the made-up GPU; whole: times of all items."""
    profiles, whole = {}, {}
    for name, each in cover.items():
        profiles[name] = measure(each, device="cuda", heads=H, head_dim=D, split_keys=split_keys)
        (count, whole[name]), (half, _) = clock.timed[-2:]
        assert count == len(work.items(each, split_keys).block) and half == -(-count // 2)
    return problem.build(cover, profiles, devices.limits(clock.device)), profiles, whole


@pytest.mark.parametrize("split_keys", [None, 64])
@pytest.mark.parametrize("name", CLOCKS)
def test_a_tile_alone_is_predicted_as_it_was_timed(ordered, monkeypatch, name, split_keys):
    cover = plans.covers(ordered, ["16x1", "32x1"])
    clock = Clock(monkeypatch, CLOCKS[name])
    found, profiles, whole = profiled(cover, clock, split_keys)
    assert sum(clock.seconds) == pytest.approx(2 * 0.5)
    first_round = np.zeros(found.n_regions, np.int64)
    for s, tile in enumerate(cover):
        # A launch that takes no more than any launch is given a tenth, so that no item is free.
        expected_us = whole[tile] if name != "launch" else 2.0 + whole[tile] / 10
        assert found.value(first_round + s, first_round) == pytest.approx(expected_us)
        alone = {tile: cover[tile]}, {tile: profiles[tile]}
        assert schedule.solve(*alone, found.limits, solver="greedy").predicted_us == pytest.approx(expected_us)


def test_a_part_of_the_regions_takes_its_share_of_the_load(ordered, monkeypatch):
    """Half of the regions on each of two tiles: each round takes its ramp, and no more than its own items."""
    cover = plans.covers(ordered, ["16x1", "32x1"])
    found, _, _ = profiled(cover, Clock(monkeypatch, CLOCKS["ramp"]), None)
    tile = np.arange(found.n_regions) % 2
    table = found.table(tile, tile)
    assert found.tile_us == pytest.approx([7.0, 7.0], rel=0.1)
    steps = []
    for s, each in enumerate(cover.values()):
        items = work.items(each, None)
        lists = tile_lists.build(each, items.block, items.run_lo, items.run_hi, 64)
        chosen = np.isin(each.region[items.block], found.region[tile == s])
        longest_first = np.argsort(items.run_lo - items.run_hi, kind="stable")
        steps.append(lists.items[chosen[longest_first], Item.STEPS])
    both_us = sum(CLOCKS["ramp"](each) for each in steps)
    assert (table.sum(axis=1) == [len(each) for each in steps]).all()
    assert found.value(tile, tile) == pytest.approx(both_us, rel=0.1)


def test_without_a_gpu_nothing_is_profiled(ordered, monkeypatch):
    hide_gpu(monkeypatch)
    with pytest.raises(DeviceError, match="expected an NVIDIA GPU"):
        measure(plans.covers(ordered, ["16x1"])["16x1"], device="cuda")


@needs_gpu
@pytest.mark.parametrize("tile", ["16x1", "64x1", "64x64"])
def test_a_gpu_tells_times_and_resources(ordered, tile):
    cover = plans.covers(ordered, [tile], region_rows=64)[tile]
    measured = measure(cover, device="cuda", dtype="bfloat16", split_keys=64)
    limits = devices.limits(measured.device)
    assert limits.max_tile_kinds == 1 and limits.lanes == measured.device["multiprocessors"]
    assert measured.device["launch_us"] > 0
    for shape in measured.shapes:
        assert shape.latency_us > 0 and shape.alone_us > 0
        assert 0 < shape.resources["shared_bytes"] <= limits.per_block["shared_bytes"]
        assert 0 < shape.resources["registers"] <= 255 and shape.resources["spills"] == 0
        assert shape.resources["resident"] >= 1
