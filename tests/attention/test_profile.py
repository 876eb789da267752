import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import plans
from helpers.gpu import hide_gpu
from tilewright import devices
from tilewright.attention import measure as measuring
from tilewright.attention import profile
from tilewright.attention.blocks import work
from tilewright.attention.cpu import probe as cpu_probe
from tilewright.attention.cpu.probe import Probe, head
from tilewright.attention.measure import expected, measure
from tilewright.attention.schedule import problem
from tilewright.core import caches
from tilewright.core.errors import ArtifactError, DeviceError, UnknownNameError
from tilewright.core.timing import FEWEST, Timing

SIZES = {"heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def cover():
    return plans.covers(plans.reordered(plans.pattern(150, 130, n_global=2), heads=2, head_dim=16), ["16x1"])["16x1"]


@pytest.fixture(scope="module")
def measured(cover):
    return measure(cover, split_keys=64, budget_s=0.1)


def test_a_profile_has_the_classes_of_the_work_items(cover, measured):
    items = work.items(cover, 64)
    assert [(c.rows, c.runs, c.masked, c.split, c.items) for c in measured.shapes] == list(
        zip(items.shape_rows, items.shape_runs, items.shape_masked, items.shape_split, items.counts, strict=True)
    )
    assert (measured.blocks_id, measured.graph_id, measured.tile) == (cover.id, cover.graph_id, "16x1")
    assert (measured.heads, measured.head_dim, measured.dtype, measured.split_keys) == (2, 16, "float32", 64)
    assert measured.device_id == devices.device_id(devices.describe("cpu"))


def test_times_are_positive_and_ordered(measured):
    assert measured.launch_us >= 0
    for shape in measured.shapes:
        assert 0 < shape.p20_us <= shape.latency_us <= shape.p80_us
        assert shape.repetitions >= FEWEST and np.isfinite(shape.rse)
        assert shape.resources["working_set_bytes"] > 0 and shape.occupancy > 0


def test_resources_count_the_tokens_of_an_item(cover):
    probe = Probe(cover, **SIZES, dtype="float16", split_keys=None, seed=0)
    shape = int(np.flatnonzero(probe.items.shape_masked)[0])
    rows, keys = int(probe.items.shape_rows[shape]), int(probe.items.shape_runs[shape]) * 16
    resources, occupancy = probe.resources(shape)
    assert resources == {"working_set_bytes": (2 * rows + 2 * keys) * 2 * 16 * 2 + 4 * rows * keys}
    assert occupancy == rows * 2 * 16 * 2 + 4 * (rows + keys)


def test_a_larger_part_of_a_batch_is_more_work(cover):
    probe = Probe(cover, **SIZES, dtype="float32", split_keys=None, seed=0)
    shape = int(probe.items.counts.argmax())
    launch = probe.launch(shape)
    assert probe.call(launch)[1] == probe.items.counts[shape]
    assert probe.call(head(launch, 1))[1] == launch.chunks[0].items
    assert probe.call(probe.launch(shape, 1))[1] == 1


def test_every_class_runs_the_code_of_the_executor(cover):
    probe = Probe(cover, **SIZES, dtype="float32", split_keys=64, seed=0)
    assert probe.items.shape_split.any()
    for shape in range(probe.items.n_shapes):
        launch = probe.launch(shape)
        call, _ = probe.call(launch)
        call()
        if launch.split:
            probe.merging(launch)()
    assert probe.passage()().shape == (1, 2, 150, 16)
    rows = sum(probe.passing_rows(shape) * probe.items.counts[shape] for shape in range(probe.items.n_shapes))
    assert rows == pytest.approx(cover.rows[cover.runs > 0].sum())


def alone(cover, measured):
    """Predicted makespan of the schedule with this tile alone."""
    found = problem.build({"16x1": cover}, {"16x1": measured}, devices.limits(measured.device))
    none = np.zeros(found.n_regions, np.int64)
    return found.value(none, none)


@pytest.mark.parametrize("split_keys", [None, 64])
@pytest.mark.parametrize("whole_us", [20.0, 987.0, 1e6])
def test_a_tile_alone_is_predicted_as_its_whole_call_was_timed(cover, monkeypatch, whole_us, split_keys):
    """Whatever its shapes take one by one."""
    rng = np.random.default_rng(0)

    def timed(call, seconds):
        us = whole_us if getattr(call, "__name__", "") == "whole" else 50 + 100 * rng.random()
        return Timing(us, us, us, 10, 0.0)

    whole = Probe.whole

    def named(self, every):
        assert every == 1, "there is time for all items"
        call, left_out = whole(self, every)
        assert not left_out.any() and call().shape == (1, 2, 150, 16)
        call.__name__ = "whole"
        return call, left_out

    monkeypatch.setattr(cpu_probe, "_time", timed)
    monkeypatch.setattr(Probe, "whole", named)
    measured = measure(cover, split_keys=split_keys, budget_s=1.0)
    assert alone(cover, measured) == pytest.approx(whole_us) and measured.tile_us == 0


def test_a_call_of_some_chunks_scales_the_times_of_all(cover, monkeypatch):
    """No more chunks run than there is time for, and the work for all rows is in any call."""
    left = []

    def timed(call, seconds):
        us = 777.0 if getattr(call, "__name__", "") == "some" else 2e3
        return Timing(us, us, us, 10, 0.0)

    whole = Probe.whole

    def named(self, every):
        assert every > 1, "all items take longer"
        call, left_out = whole(self, every)
        left.append(left_out)
        call.__name__ = "some"
        return call, left_out

    monkeypatch.setattr(cpu_probe, "_time", timed)
    monkeypatch.setattr(Probe, "whole", named)
    scaled = measure(cover, split_keys=None, budget_s=0.01)
    monkeypatch.setattr(cpu_probe, "_scale", lambda *of: 1.0)
    raw = measure(cover, split_keys=None, budget_s=0.01)
    scale = alone(cover, scaled) / alone(cover, raw)
    assert left[0].any() and (left[0] <= [shape.items for shape in raw.shapes]).all()
    for one, other in zip(scaled.shapes, raw.shapes, strict=True):
        assert one.latency_us == pytest.approx(scale * other.latency_us)
    # What was left out is less than all: without it the same time means slower items.
    assert scale > 777.0 / alone(cover, raw)


TIMES = st.floats(1e-3, 1e6)


@given(
    st.lists(st.tuples(TIMES, TIMES, st.integers(1, 1000)), min_size=1, max_size=6), TIMES, TIMES, st.integers(1, 132)
)
def test_fitted_costs_add_up_to_the_whole(costs, whole_us, load_us, lanes):
    shapes = [
        profile.ItemShape(16, 1, False, False, items, us, alone_us, us, us, 10, 0.01, {}, 0.0)
        for us, alone_us, items in costs
    ]
    tile_us, found = profile.fitted(shapes, whole_us=whole_us, load_us=load_us, lanes=lanes)
    load = sum(shape.items * shape.latency_us for shape in found) / lanes
    assert max(load + tile_us, *(shape.alone_us for shape in found)) == pytest.approx(whole_us)
    assert tile_us >= 0 and load == pytest.approx(min(load_us, whole_us))
    ratios = [after.latency_us / before.latency_us for after, before in zip(found, shapes, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_save_and_load(tmp_path, measured):
    profile.save(tmp_path / "p.json", measured, {"stage": "profile"})
    assert profile.load(tmp_path / "p.json") == measured


@pytest.mark.parametrize("lost", ["launch_us", "shapes", "device"])
def test_an_incomplete_file_is_refused(tmp_path, measured, lost):
    profile.save(tmp_path / "p.json", measured)
    document = json.loads((tmp_path / "p.json").read_text())
    del document[lost]
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="expected a complete profile file"):
        profile.load(tmp_path / "p.json")


def test_an_altered_device_is_refused(tmp_path, measured):
    profile.save(tmp_path / "p.json", replace(measured, device={**measured.device, "name": "a faster one"}))
    with pytest.raises(ArtifactError, match="altered"):
        profile.load(tmp_path / "p.json")


def test_bad_arguments_are_refused(cover, monkeypatch):
    hide_gpu(monkeypatch)
    with pytest.raises(DeviceError, match="known: cpu"):
        measure(cover, device="cuda")
    with pytest.raises(UnknownNameError, match="float32, float16, bfloat16"):
        measure(cover, dtype="int8")
    with pytest.raises(ArtifactError, match="--head-dim"):
        measure(replace(cover, meta={"heads": 2}))


@pytest.fixture
def timed(monkeypatch, tmp_path, measured):
    """Times that were asked for, of blocks; they spread as `timed.spread` says."""
    asked = SimpleNamespace(blocks=[], spread=0.1)

    def counted(blocks, **options):
        asked.blocks.append(blocks)
        shapes = tuple(
            replace(each, p20_us=each.latency_us, p80_us=each.latency_us * (1 + asked.spread))
            for each in measured.shapes
        )
        return replace(measured, blocks_id=blocks.id, graph_id=blocks.graph_id, shapes=shapes)

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "measure", counted)
    forget(monkeypatch)
    return asked


def forget(monkeypatch):
    """As in another process."""
    monkeypatch.setattr(measuring, "_TIMES", caches.Recent(256))


def shifted():
    """Blocks of another pattern than `cover`'s, whose items have the same shapes."""
    other = plans.pattern(150, 130, n_global=2)[:, ::-1]
    return plans.covers(plans.reordered(other, heads=2, head_dim=16), ["16x1"])["16x1"]


def test_items_of_shapes_that_were_timed_are_not_timed_again(cover, timed, monkeypatch):
    (first,) = expected({"16x1": cover}, split_keys=64).values()
    other = shifted()
    assert other.id != cover.id and len(timed.blocks) == 1
    for _ in range(2):
        (second,) = expected({"16x1": other}, split_keys=64).values()
        assert (second.blocks_id, second.graph_id) == (other.id, other.graph_id)
        assert second == replace(first, blocks_id=other.id, graph_id=other.graph_id) and len(timed.blocks) == 1
        forget(monkeypatch)
    for n, options in enumerate(({"split_keys": 32}, {"dtype": "bfloat16"}, {"heads": 3}, {"head_dim": 8}), 2):
        expected({"16x1": cover}, **{"split_keys": 64} | options)
        assert len(timed.blocks) == n


@pytest.mark.parametrize("change", ["device", "code", "file", "another"])
def test_times_hold_for_a_device_and_its_code(cover, timed, monkeypatch, tmp_path, change):
    expected({"16x1": cover}, split_keys=64)
    forget(monkeypatch)
    (path,) = (tmp_path / "times").glob("*.json")
    if change == "device":
        described = devices.describe("cpu")
        monkeypatch.setattr(devices, "describe", lambda kind: described | {"threads": 77})
    elif change == "code":
        monkeypatch.setattr(measuring, "_code", lambda device: "another")
    else:
        text = path.read_text()
        path.write_text(text[:99] if change == "file" else text.replace('"made_for": "', '"made_for": "0'))
    expected({"16x1": cover}, split_keys=64)
    assert len(timed.blocks) == 2


def test_times_of_a_device_that_others_use_serve_one_process(cover, timed, monkeypatch):
    timed.spread = 0.5
    for n in (1, 2):
        for _ in range(2):
            expected({"16x1": cover}, split_keys=64)
            assert len(timed.blocks) == n
        forget(monkeypatch)
