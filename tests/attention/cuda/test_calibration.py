"""Calibrations of a GPU and what they predict: made-up GPUs, the interpreter, and a GPU where there is one."""

import itertools
import multiprocessing
import threading
import types
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import tilewright as tw
from helpers import plans
from helpers.gpu import TRITON_DEVICE
from tilewright import __main__ as command
from tilewright import devices, graph
from tilewright import masks as models
from tilewright.attention import backends, blocks, measure, reorder
from tilewright.attention.blocks import tiles, work
from tilewright.attention.cuda import calibration, calibration_fit, config, cost_model, probe, tile_lists
from tilewright.attention.cuda.calibration_fit import VARIANTS, Point, Setup
from tilewright.attention.cuda.cost_model import Calibration, Kernel, Launch
from tilewright.attention.cuda.tile_lists import Item
from tilewright.attention.measure import expected
from tilewright.core import caches
from tilewright.core.errors import DeviceError
from tilewright.core.timing import time_gpu

TILE = tiles.parse("64x1")
DEVICE = {
    "kind": "cuda",
    "name": "Made-up GPU",
    "capability": "9.0",
    "multiprocessors": 8,
    "driver": "1.2",
    "l2_bytes": 1 << 23,
    "launch_us": 1.0,
    "registers": 1 << 16,
    "shared_bytes": 227 << 10,
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.0"},
}
NEEDS = {"registers": 126.0, "spills": 0.0, "shared_bytes": 47360.0, "resident": 4.0}


def truth(**changes):
    """A calibration of made-up numbers: four programs on each of eight multiprocessors."""
    kernels = []
    for rank in VARIANTS:
        masked = {None: 0.0, 16: 0.1, 32: 0.2, 1: 0.3, 2: 0.4, 0: 0.5}[rank]
        partial = (0.0,) * 4 if rank is None else (0.6 + masked, 0.8 + masked, 1.0 + masked, 1.3 + masked)
        costs = (2.0, 2.2, 2.5, 3.0), (0.5, 0.7, 0.9, 1.2), partial
        steady = 2.0, 1.1, 0.0 if rank is None else 1.2 + masked
        kernels.append(Kernel(rank, 126, 0, 47360, 4, 4, (1, 2, 3, 4), *costs, steady))
    facts = {"rows": 64, "step_keys": 64, "multiprocessors": 8, "l2_bytes": 1 << 23}
    memory = {"by_age": 0.1, "scattered_us": 0.05, "missed_us": 0.2}
    masks = {"apart_factors_us": 0.05, "apart_tiles_us": 0.1, "own_tiles_us": 0.2, "missed_tiles_us": 0.1}
    parts = {"part_us": 0.4, "merge_us": 0.3, "merge_few_us": 0.5}
    quality = {"error": 0.01, "spread": 0.0, "seconds": 1.0, "timings": ()}
    found = Calibration(
        made_for={}, kernels=tuple(kernels), launch_us=3.0, **facts, **memory, **masks, **parts, **quality
    )
    return replace(found, **changes)


class MadeUp:
    """A GPU whose times follow from what is `known`, with noise."""

    def __init__(self, setup, noise=0.0, drift=0.0, known=None):
        self.setup, self.noise, self.drift, self.known = setup, noise, drift, known or truth()
        self.rng, self.calls = np.random.default_rng(0), 0

    def resources(self, lists):
        return NEEDS

    def timed(self, lists, n_tokens, batch):
        known, rank = self.known, lists.rank if lists.partial else None
        launch = cost_model.describe(lists, known, batch, self.setup.head_dim, self.setup.dtype)
        us = calibration_fit.predicted(replace(launch, rank=rank), known)
        self.calls += 1
        return us * (1 + self.noise * self.rng.standard_normal()) * (1 + self.drift * self.calls), self.noise


SETUP = Setup(64, 64, 64, "bfloat16", 8, 1 << 23)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """What fits the second-level cache of the made-up GPU."""
    monkeypatch.setattr(calibration_fit, "NEAR_TOKENS", 512)


def even():
    """`truth` of programs that share a multiprocessor alike and gain nothing from others that end."""
    kernels = [
        replace(each, steady_us=(each.item_us[-1], each.full_us[-1], each.partial_us[-1])) for each in truth().kernels
    ]
    return truth(kernels=tuple(kernels), by_age=0.0)


def test_costs_are_found_again_from_times_with_noise():
    known = even()
    found = calibration.measure(MadeUp(SETUP, noise=0.002, known=known), {})
    for kernel in known.kernels:
        other = found.kernel(kernel.rank)
        for name, atol in {"item_us": 0.6, "full_us": 0.06, "partial_us": 0.06}.items():
            assert np.allclose(getattr(other, name), getattr(kernel, name), atol=atol), (kernel.rank, name)
    assert found.launch_us == pytest.approx(known.launch_us, abs=0.5) and found.by_age == 0
    for name, atol in {
        "missed_us": 0.05,
        "own_tiles_us": 0.08,
        "part_us": 0.15,
        "merge_us": 0.1,
    }.items():
        assert getattr(found, name) == pytest.approx(getattr(known, name), abs=atol), name
    assert found.error < 0.01 and found.spread < calibration.MOST_SPREAD


def test_other_launches_take_what_a_calibration_says():
    gpu, rng, off = MadeUp(SETUP), np.random.default_rng(1), []
    found = calibration.measure(gpu, {})
    for rank in (16, 32, 1, 2, 0):
        for n_items in (5, 16, 30, 41, 100, 300):
            full, partial = rng.integers(0, 6, n_items), rng.integers(1, 12, n_items)
            given = launch(full, partial, rank, hb=2, scattered=0.1)
            one, other = (calibration_fit.predicted(given, each) for each in (gpu.known, found))
            off.append(abs(other / one - 1))
    assert np.median(off) < 0.03 and max(off) < 0.08


def test_a_gpu_that_others_use_is_said(caplog, monkeypatch, tmp_path):
    made_up(monkeypatch, tmp_path, lambda: MadeUp(SETUP, drift=0.002))
    found = calibration.of([TILE], 64, "bfloat16")["64x1"]
    assert found.spread > calibration.MOST_SPREAD
    assert [record.getMessage()[:34] for record in caplog.records] == ["the GPU seems in use by others: ti"]


def launch(full, partial, rank=16, hb=1, **features):
    full, partial = np.array(full), np.array(partial)
    none = np.zeros(len(full))
    return Launch(full, partial, none.astype(bool), none, none, hb, rank, **features)


def test_durations_are_sums_of_their_parts():
    known = truth()
    two = launch([3, 0], [5, 2], rank=32, scattered=0.5, missed=0.25, apart=0.4)
    together, steady = cost_model.durations(two, known)
    step = 0.5 * 0.05 + 0.25 * 0.2
    for i, (full, partial) in enumerate([(3, 5), (0, 2)]):
        more = (full + partial) * step + partial * 0.4 * 0.05
        costs = zip((2.0, 2.2, 2.5, 3.0), (0.5, 0.7, 0.9, 1.2), (0.8, 1.0, 1.2, 1.5), strict=True)
        by_hand = [a + full * b + partial * c + n * more for n, (a, b, c) in enumerate(costs, start=1)]
        assert together[i] == pytest.approx(by_hand)
        assert steady[i] == pytest.approx(2.0 + full * 1.1 + partial * 1.4 + 4 * more)
    tiled = launch([0], [10], rank=0, apart=1.0, own=0.5, missed_tiles=0.5)
    more = 10 * (0.1 + 0.5 * 0.2 + 0.5 * 0.1)
    assert cost_model.durations(tiled, known)[1][0] == pytest.approx(2.0 + 10 * 1.7 + 4 * more)


def test_programs_fill_the_multiprocessors_one_after_the_other():
    together, steady, fair = np.array([[1.0, 1.5, 2.0]]), np.array([1.8]), truth(multiprocessors=2, by_age=0.0)

    def took(n_items, hb=1):
        return cost_model.makespan(together.repeat(n_items, 0), steady.repeat(n_items), hb, fair)

    assert took(1) == took(2) == pytest.approx(1.0)
    assert took(3) == took(2, 2) == pytest.approx(1.5)
    assert took(6) == took(3, 2) == pytest.approx(2.0)
    # One more runs alone when the others have ended, and full loads one after the other are steady.
    assert took(7) == pytest.approx(3.0)
    assert took(12) == pytest.approx(3.8)
    assert took(60) == pytest.approx(2.0 + 9 * 1.8)
    # A short program leaves early; the long one is faster then.
    mixed = cost_model.makespan(
        np.array([[4.0, 8.0], [1.0, 2.0]]), np.array([8.0, 2.0]), 1, replace(fair, multiprocessors=1)
    )
    assert mixed == pytest.approx(2.0 + (1 - 2.0 / 8.0) * 4.0)


def test_older_programs_go_first():
    took_us = np.array([10.0, 12.0, 20.0])
    assert (cost_model.shares(took_us, 0.0) == 1).all()
    # The first as if it were alone, the second with what two do more than one, the third with what is left.
    done = [1 / 10, 2 / 12 - 1 / 10, 3 / 20 - 2 / 12]
    assert done[2] < 0
    two, three = cost_model.shares(took_us, 1.0)[1:]
    assert two[:2] == pytest.approx([12 * done[0], 12 * done[1]])
    assert three.sum() == pytest.approx(3) and three[0] > three[1] > three[2] > 0
    half = cost_model.shares(took_us, 0.5)
    assert half[1, :2] == pytest.approx((1 + two[:2]) / 2)


def test_many_programs_take_what_their_load_does(monkeypatch):
    together, steady, two = np.array([[1.0, 1.5, 2.0]]).repeat(600, 0), np.full(600, 1.8), truth(multiprocessors=2)
    whole = cost_model.makespan(together, steady, 2, two)
    monkeypatch.setattr(cost_model, "PLAYED", 100)
    assert cost_model.makespan(together, steady, 2, two) == pytest.approx(whole, rel=0.01)


@pytest.fixture(scope="module")
def windows():
    ordered, _ = reorder.apply(models.build("vil-tiny-256-s1-exact"), "window")
    return blocks.extract(ordered, TILE)


def test_a_prediction_is_the_launch_of_all_items(monkeypatch, windows):
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE)
    options = {"heads": 6, "head_dim": 64, "dtype": "bfloat16", "split_keys": 512, "calibration": truth()}
    launch_us, tile_us, shapes = cost_model.predict(windows, **options)
    items = work.items(windows, 512)
    lists = tile_lists.build(windows, items.block, items.run_lo, items.run_hi, 64)
    took_us = cost_model.durations(cost_model.describe(lists, truth(), 6, 64, "bfloat16"), truth())
    load_us = sum(shape.latency_us * shape.items for shape in shapes) / 8
    whole_us = truth().launch_us + cost_model.makespan(*took_us, 6, truth())
    assert DEVICE["launch_us"] + launch_us + tile_us + load_us == pytest.approx(whole_us)
    # Longer items take longer, and a bias reads tiles where windows have factors.
    assert all(shape.alone_us > 0 and shape.repetitions == 0 for shape in shapes)
    _, _, biased = cost_model.predict(windows, **options, bias_heads=6)
    assert sum(shape.latency_us * shape.items for shape in biased) / 8 > 1.2 * load_us


def test_a_launch_that_takes_less_than_its_load_is_predicted_so(monkeypatch, windows):
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE)
    monkeypatch.setattr(cost_model, "makespan", lambda *arguments: 11.0)
    options = {"heads": 6, "head_dim": 64, "dtype": "bfloat16", "split_keys": 512, "calibration": truth()}
    _, tile_us, shapes = cost_model.predict(windows, **options)
    load_us = sum(shape.latency_us * shape.items for shape in shapes) / 8
    assert tile_us == 0 and DEVICE["launch_us"] + load_us == pytest.approx(truth().launch_us + 11.0)
    assert max(shape.alone_us for shape in shapes) <= load_us


def test_masks_apart_and_keys_out_of_reach_are_seen(windows):
    items = work.items(windows, None)
    lists = tile_lists.build(windows, items.block, items.run_lo, items.run_hi, 64)
    seen = cost_model.describe(lists, truth(l2_bytes=1 << 30), 6, 64, "bfloat16")
    assert seen.rank == 16 and 0 < seen.apart < 1 and seen.missed == 0 and 0 < seen.scattered < 0.2
    small = cost_model.describe(lists, truth(l2_bytes=1 << 14), 6, 64, "bfloat16")
    assert small.missed > 0.05
    rng = np.random.default_rng(0)
    spread = replace(lists, keys=rng.permuted(lists.keys, axis=1))
    assert cost_model.describe(spread, truth(), 6, 64, "bfloat16").scattered == pytest.approx(seen.scattered)
    far = replace(lists, keys=rng.integers(0, windows.shape[1], lists.keys.shape).astype(np.int32))
    assert cost_model.describe(far, truth(), 6, 64, "bfloat16").scattered > 0.8


@pytest.mark.parametrize("kind, rank", [("band", tile_lists.INTERVALS), ("random", tile_lists.BYTES)])
def test_masks_without_factors_are_predicted_as_they_run(monkeypatch, kind, rank):
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE)
    at, rng = np.arange(1024), np.random.default_rng(0)
    near = np.abs(at[:, None] - at) <= 64
    cover = blocks.extract(graph.from_pattern(near if kind == "band" else near & (rng.random(near.shape) < 0.5)), TILE)
    items = work.items(cover, None)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64)
    seen = cost_model.describe(lists, truth(), 6, 64, "bfloat16")
    # Blocks within a band share their masks, random ones have their own. No item pays for tiles of floats.
    assert (seen.rank, seen.own, seen.missed_tiles) == (rank, 0, 0)
    assert seen.apart < 0.4 if kind == "band" else seen.apart > 0.9
    options = {"heads": 6, "head_dim": 64, "dtype": "bfloat16", "split_keys": None}
    dearer = [replace(each, item_us=(90.0,) * 4) if each.rank == rank else each for each in truth().kernels]
    wholes = []
    for known in (truth(), truth(kernels=tuple(dearer))):
        _, tile_us, shapes = cost_model.predict(cover, **options, calibration=known)
        wholes.append(tile_us + sum(shape.latency_us * shape.items for shape in shapes) / 8)
    assert wholes[1] > 2 * wholes[0]


def test_registers_are_those_of_a_quarter_of_a_multiprocessor():
    facts = {"registers": 65536, "shared_bytes_each": 233472}

    def resident(registers, warps, shared=1024):
        metadata = types.SimpleNamespace(num_warps=warps, shared=shared)
        compiled = types.SimpleNamespace(metadata=metadata, n_regs=registers, n_spills=0)
        return probe.resources(compiled, facts)["resident"]

    # 104 registers leave room for 4 warps in each quarter, though all 65,536 would hold 9 programs of two warps.
    assert resident(104, 2) == 8
    assert resident(126, 4) == 4
    assert resident(32, 1) == 32
    assert resident(32, 4, 57600) == 3


# Files.


def made_up(monkeypatch, folder, gpu=lambda: MadeUp(SETUP)):
    """Make this machine one with a made-up GPU, and `folder` the cache."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(folder))
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE)
    monkeypatch.setattr(calibration, "_HELD", {})
    monkeypatch.setattr(calibration, "compile_ahead", lambda *arguments: None)
    monkeypatch.setattr(calibration, "Gpu", lambda tile, head_dim, dtype: gpu())


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    made = MadeUp(SETUP)
    made_up(monkeypatch, tmp_path, lambda: made)
    return made


def test_a_calibration_is_made_once_for_all_tiles_of_a_form(gpu, monkeypatch):
    found = calibration.of([TILE, tiles.parse("64x64")], 64, "bfloat16")
    calls = gpu.calls
    assert found["64x1"] is found["64x64"] and calls > 0
    monkeypatch.setattr(calibration, "_HELD", {})
    again = calibration.of([TILE], 64, "bfloat16")["64x1"]
    assert again == found["64x1"] and gpu.calls == calls
    calibration.measured([TILE], [(64, "bfloat16")], anew=True)
    assert gpu.calls == 2 * calls
    calibration.of([TILE], 32, "bfloat16")
    assert gpu.calls == 3 * calls
    # The other type of 16 bits, and head dims of as many columns.
    assert calibration.of([TILE], 64, "float16") == calibration.of([TILE], 56, "bfloat16")
    assert gpu.calls == 3 * calls


def made_for():
    """What a calibration holds for."""
    return calibration.made_for(TILE, 64, "bfloat16")


class Small(MadeUp):
    """A GPU that some ranks do not fit."""

    def __init__(self, refused):
        super().__init__(SETUP)
        self.refused = refused

    def resources(self, lists):
        rank, split = lists.rank if lists.partial else None, len(lists.parts) > 0
        if (rank, split) in self.refused:
            raise DeviceError("too large")
        return NEEDS


def test_what_does_not_fit_is_left_out(monkeypatch, tmp_path, windows):
    made_up(monkeypatch, tmp_path, lambda: Small([(0, False), (0, True), (32, True)]))
    calibration.of([TILE], 64, "bfloat16")
    monkeypatch.setattr(calibration, "_HELD", {})
    found = calibration.of([TILE], 64, "bfloat16")["64x1"]
    assert [kernel.rank for kernel in found.kernels] == [None, 16, 32, 1, 2] and found.own_tiles_us == 0
    options = {"heads": 6, "head_dim": 64, "dtype": "bfloat16", "split_keys": 512, "calibration": found}
    cost_model.predict(windows, **options)
    with pytest.raises(DeviceError, match="of 64 rows: expected masks of a rank that fits this device"):
        cost_model.predict(windows, **options, bias_heads=6)
    assert calibration.summary(found)["tiles"] == "-"


def test_a_tile_that_does_not_fit_is_refused(monkeypatch, tmp_path):
    made_up(monkeypatch, tmp_path, lambda: Small([(16, False)]))
    with pytest.raises(DeviceError, match="too large"):
        calibration.of([TILE], 64, "bfloat16")


def test_variants_are_compiled_side_by_side(monkeypatch):
    started = []

    class Process:
        def __init__(self, command, env, **where):
            started.append(command)

        def wait(self, seconds):
            assert len(started) == 3, "one waits for another"

    monkeypatch.setattr(calibration.subprocess, "Popen", Process)
    monkeypatch.setattr(calibration.os, "sched_getaffinity", lambda pid: set(range(3)))
    calibration.compile_ahead([(TILE, 64, "bfloat16"), (tiles.parse("32x1"), 48, "float32")])
    assert len(started) == 3
    assert all(command[1:3] == ["-m", calibration.__name__] for command in started)
    jobs = sorted(job for command in started for job in command[3:])
    assert jobs == sorted(
        f"{each},{rank},{split}"
        for each in ("64x1,64,bfloat16", "32x1,48,float32")
        for rank in VARIANTS
        for split in (0, 1)
    )


def test_another_device_driver_library_or_kernel_has_another_calibration(gpu, monkeypatch):
    calibration.of([TILE], 64, "bfloat16")
    calls, paths = gpu.calls, {calibration.path_of(made_for())}
    for change in ("name", "driver", "torch", "triton", "multiprocessors", "kernel"):
        with monkeypatch.context() as changed:
            if change == "kernel":
                changed.setattr(calibration, "kernel_digest", lambda: "another")
            else:
                value = {change: 4 if change == "multiprocessors" else "9.9"}
                other = {"versions": DEVICE["versions"] | value} if change in DEVICE["versions"] else value
                stated = DEVICE | other
                changed.setattr(devices, "describe", lambda kind, stated=stated: stated)
            assert calibration.path_of(made_for()) not in paths, change
            paths.add(calibration.path_of(made_for()))
            if change in ("driver", "kernel"):
                # What this process holds is of the other one, too.
                before = gpu.calls
                calibration.of([TILE], 64, "bfloat16")
                assert gpu.calls == before + calls
    assert len(paths) == 7


def test_a_broken_file_is_replaced_with_one_line(gpu, monkeypatch, caplog):
    found = calibration.of([TILE], 64, "bfloat16")["64x1"]
    path, calls = calibration.path_of(made_for()), gpu.calls
    text = path.read_text()
    broken = {
        "cut": text[: len(text) // 2],
        "foreign": text.replace("Made-up GPU", "Another GPU"),
        "negative": text.replace('"launch_us": ', '"launch_us": -'),
        "empty": "",
    }
    for number, (damage, content) in enumerate(broken.items(), 2):
        caplog.clear()
        path.write_text(content)
        monkeypatch.setattr(calibration, "_HELD", {})
        assert replace(calibration.of([TILE], 64, "bfloat16")["64x1"], seconds=0.0) == replace(found, seconds=0.0)
        assert gpu.calls == number * calls, damage
        (record,) = caplog.records
        assert "a calibration is made again" in record.getMessage() and "\n" not in record.getMessage()
        assert str(path) in record.getMessage()
        monkeypatch.setattr(calibration, "_HELD", {})
        calibration.of([TILE], 64, "bfloat16")
        assert gpu.calls == number * calls, damage


def test_without_a_place_for_files_a_calibration_serves_the_process(gpu, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    calibration.of([TILE], 64, "bfloat16")
    calls = gpu.calls
    assert [record.getMessage()[:43] for record in caplog.records] == ["the calibration serves this process alone: "]
    calibration.of([TILE], 64, "bfloat16")
    assert gpu.calls == calls


def calibrate_here(folder, barrier, results):
    patch = pytest.MonkeyPatch()
    made = MadeUp(SETUP)
    made_up(patch, folder, lambda: made)
    barrier.wait()
    calibration.of([TILE], 64, "bfloat16")
    results.put(made.calls)


def test_two_processes_calibrate_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    running = [context.Process(target=calibrate_here, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in running:
        process.start()
    calls = sorted(results.get(timeout=120) for _ in running)
    for process in running:
        process.join()
    assert calls[0] == 0 < calls[1]


def test_a_lock_is_waited_for(tmp_path):
    done = threading.Event()

    def wait_for_lock():
        with caches.locked(tmp_path / "a" / "lock"):
            done.set()

    with caches.locked(tmp_path / "a" / "lock"):
        other = threading.Thread(target=wait_for_lock)
        other.start()
        assert not done.wait(0.3)
    assert done.wait(60)
    other.join()


KERNEL = '''"""A kernel."""

def attention(q, k):  # pointers
    """Scores."""
    return dot(q, k)
'''


def test_a_kernel_is_known_by_what_it_does():
    known = calibration.code_digest(KERNEL)
    written = KERNEL.replace("A kernel", "Another").replace("Scores", "Words").replace("# pointers", "# q, k")
    assert calibration.code_digest(written.replace("(q, k):", "(\n    q,\n    k,\n):")) == known
    assert calibration.code_digest(KERNEL.replace("dot(q, k)", "dot(k, q)")) != known
    assert len({calibration.code_digest(*each) for each in ((KERNEL,), (KERNEL, KERNEL), ())}) == 3


@pytest.mark.parametrize("path", sorted(calibration.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_what_comes_with_the_package_is_of_its_kernel(path):
    """Else, on such a GPU: ``tilewright calibrate --all --anew -o src/tilewright/attention/cuda/calibrations/…``."""
    (found,) = (
        each for each in calibration._read_shipped() if f"{each.name.lower().replace(' ', '-')}.json" == path.name
    )
    assert found.kernel == calibration.kernel_digest(), "a kernel was changed: calibrate the GPU again"
    # What `config.for_tile` gives on such a GPU, for all tiles that plans choose from.
    room = config.Room(shared_bytes=227 << 10, registers=1 << 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_here", lambda: room)
        wanted = [
            calibration.form(tiles.parse(name), *size)
            for size in calibration.SHIPPED_SIZES
            for name in devices.facts("cuda").TILES
        ]
    assert all(each in [one.made_for for one in found.calibrations] for each in wanted)
    assert max(one.error for one in found.calibrations) < 0.1 and path.stat().st_size < 150_000


@pytest.fixture
def package(gpu, monkeypatch, tmp_path):
    """The folder of what comes with the package: a file of the made-up GPU; nothing was measured here."""
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path / "package")
    monkeypatch.setattr(calibration, "_read_shipped", calibration._read_shipped.__wrapped__)
    monkeypatch.setattr(calibration, "_say_sibling", calibration._say_sibling.__wrapped__)
    names = [TILE, tiles.parse("64x64")]
    measured = calibration.measured(names, [(64, "bfloat16"), (48, "bfloat16")])
    calibration.ship(tmp_path / "package" / "gpu.json", [each for by in measured.values() for each in by.values()])
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(calibration, "_HELD", {})
    gpu.calls = 0
    return measured


def elsewhere(monkeypatch, **facts):
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE | facts)


def test_a_calibration_that_comes_with_the_package_serves_any_driver_and_library(package, gpu, monkeypatch):
    elsewhere(monkeypatch, driver="9.9", versions={"torch": "3.0", "triton": "4.0", "numpy": "3.0"})
    (held,) = calibration.shipped()
    assert (held.name, len(held.calibrations)) == ("Made-up GPU", 2)
    for size in ((64, "bfloat16"), (64, "float16"), (56, "bfloat16"), (40, "float16")):
        found = calibration.of([TILE], *size)["64x1"]
        known = package[48 if size[0] == 40 else 64, "bfloat16"]
        assert found.launch_us == pytest.approx(known["64x1"].launch_us, rel=1e-3) and not found.timings
    assert gpu.calls == 0
    # What was measured here is taken first, and what is not there is measured.
    measured = calibration.measured([TILE], [(64, "bfloat16")])[64, "bfloat16"]["64x1"]
    calls = gpu.calls
    assert calibration.of([TILE], 64, "bfloat16")["64x1"] is measured and gpu.calls == calls > 0
    calibration.of([TILE], 64, "float32")
    assert gpu.calls > calls


def test_a_gpu_with_as_many_multiprocessors_serves_until_this_one_is_calibrated(package, gpu, monkeypatch, caplog):
    elsewhere(monkeypatch, name="Its sibling", l2_bytes=1 << 22)
    found = calibration.of([TILE], 64, "bfloat16")["64x1"]
    assert gpu.calls == 0 and found.l2_bytes == 1 << 22
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "plans are made from times of a Made-up GPU"
    ]
    for other in ({"capability": "8.0"}, {"multiprocessors": 9}):
        elsewhere(monkeypatch, **other)
        assert calibration.shipped() == []


def test_another_kernel_has_no_calibration_in_the_package(package, gpu, monkeypatch):
    monkeypatch.setattr(calibration, "kernel_digest", lambda: "another")
    assert calibration.shipped() == []
    calibration.of([TILE], 64, "bfloat16")
    assert gpu.calls > 0


def plain_scattered(lists):
    keys = np.sort(lists.keys[:-1], axis=1)
    return float((np.diff(keys, axis=1) > 1).mean())


def plain_missed(lists, wave, row_bytes, l2_bytes, mask_bytes):
    """`cost_model._missed` read by read: what came between the last wave that read a key and this one, in bytes."""
    steps, used = lists.items[:, Item.STEPS], lists.keys[:-1]
    wave = max(wave, -(-len(steps) // cost_model._WAVES))
    owner = np.repeat(np.arange(len(steps)), steps) // wave
    reads = [set(used[owner == w].ravel().tolist()) for w in range(owner[-1] + 1)]
    total, distinct = sum(map(len, reads)), len(set().union(*reads))
    read_bytes = distinct * row_bytes + mask_bytes + int(lists.items[:, Item.ROWS].sum()) * row_bytes
    if read_bytes <= l2_bytes:
        return 0.0, read_bytes
    until = np.concatenate(([0.0], np.cumsum([len(own) * (row_bytes + mask_bytes / total) for own in reads])))
    last, missed = {}, 0
    for w, own in enumerate(reads):
        for key in own:
            missed += key not in last or min(until[w] - until[last[key]], read_bytes) > l2_bytes
            last[key] = w
    return missed / used.size, read_bytes


@pytest.mark.parametrize("seed", range(6))
def test_what_a_cache_misses_is_counted_read_by_read(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(cost_model, "_WAVES", int(rng.integers(2, 40)))
    steps = rng.integers(0 if seed % 2 else 1, 5, 50)
    steps[-1] = 3
    items = np.zeros((50, len(Item)), np.int32)
    items[:, Item.STEPS], items[:, Item.ROWS] = steps, 16
    # Windows that move on, some keys again, in any order and in order.
    keys = (np.arange(steps.sum() + 1)[:, None] * 8 + rng.integers(0, 90, (steps.sum() + 1, 64))).astype(np.int32)
    keys[::3] = np.sort(keys[::3], axis=1)
    lists = types.SimpleNamespace(items=items, keys=keys)
    assert cost_model._scattered(lists) == plain_scattered(lists)
    for l2_bytes in (1 << 30, 60_000, 9_000, 1):
        given = 2, 128, l2_bytes, 4096
        assert cost_model._missed(lists, *given) == plain_missed(lists, *given)
    shares = [cost_model._missed(lists, 2, 128, l2_bytes, 4096)[0] for l2_bytes in (1 << 30, 9_000, 1)]
    assert shares[0] == 0 < shares[1] <= shares[2] <= 1


# Who asks for calibrations.


def test_tiles_are_predicted_side_by_side_as_one_by_one(gpu, monkeypatch):
    ordered = models.build("vil-tiny-224-s1-exact")
    ordered, _ = reorder.apply(ordered, "window")
    made = blocks.extract_all(ordered, [tiles.parse(name) for name in ("16x1", "64x1", "64x64")])
    monkeypatch.setattr(calibration, "of", lambda tiles, *form: {tile.name: truth() for tile in tiles})
    found = []
    for large in (0, 1 << 60):
        monkeypatch.setattr(measure, "LARGE", large)
        found.append(expected(made, device="cuda", heads=6, head_dim=64, dtype="bfloat16", split_keys=512))
    assert list(found[0]) == list(made) and found[0] == found[1]


def test_profiles_are_predicted_where_there_is_a_cost_model(gpu, monkeypatch, windows):
    (profile,) = expected({"64x1": windows}, device="cuda", heads=6, head_dim=64, dtype="bfloat16").values()
    assert profile.source == "predicted" and profile.device == DEVICE
    assert gpu.calls > 0


@pytest.mark.parametrize("apart_us", [0.0, 500.0])
def test_auto_takes_the_order_that_a_calibration_predicts_to_be_fastest(gpu, monkeypatch, apart_us):
    """Also where masks that differ between programs, which some orders have more of, cost what nothing else does."""
    facts = {"threads": 8, "shared_bytes": 1 << 18, "memory_bytes": 1 << 34}
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE | facts)
    known = truth(apart_factors_us=apart_us, apart_tiles_us=apart_us)
    monkeypatch.setattr(calibration, "of", lambda tiles, *form: {tile.name: known for tile in tiles})
    pattern = models.build("vil-tiny-224-s1-exact")
    options = {"heads": 6, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda", "tiles": ("64x1",)}
    found = tw.plan(pattern, **options, solver="greedy")
    alone = {
        name: tw.plan(pattern, **options, solver="greedy", reorder=name).schedule.predicted_us
        for name in ("window", "none", "ic")
    }
    among = found.reorder["among"]
    assert among == pytest.approx({name: alone[name] for name in among}) and len(among) > 1
    assert found.reorder["order"] == min(among, key=among.get)
    assert found.schedule.predicted_us == pytest.approx(min(among.values()))


def test_a_device_without_a_cost_model_is_measured():
    cover = plans.covers(plans.reordered(plans.pattern(40, 40)), ["16x1"])
    (profile,) = expected(cover, device="cpu", heads=1, head_dim=8).values()
    assert profile.source == "measured"
    with pytest.raises(DeviceError, match="kind 'cpu' has no cost model to calibrate; known: cuda"):
        backends.cost_model("cpu")


def test_the_command_calibrates_and_prints_a_table(gpu, capsys):
    assert command.main(["calibrate", "--head-dim", "64", "--tiles", "64x1", "64x64"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["type", "head", "dim"] and len(rows) == 2
    assert "bfloat16" in rows[0] and rows[1].split()[2] == "64x64"


def test_the_command_writes_what_comes_with_the_package(gpu, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "SHIPPED_SIZES", ((32, "bfloat16"), (64, "float32")))
    assert command.main(["calibrate", "--all", "-o", str(tmp_path / "gpu.json")]) == 0
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path)
    (found,) = calibration._read_shipped.__wrapped__()
    assert [each.made_for["rows"] for each in found.calibrations] == [32, 64] * 2


def test_the_command_says_what_it_cannot_do(capsys):
    assert command.main(["calibrate", "--device", "cpu"]) == 2
    assert "has no cost model" in capsys.readouterr().err


# The launches that are timed.


@pytest.mark.parametrize("rank, own_masks", [(None, False), *itertools.product(VARIANTS[1:], (False, True))])
def test_made_up_items_are_as_their_point_says(rank, own_masks):
    point = Point(rank, 4, 3, full=2, partial=0 if rank is None else 5, own_masks=own_masks, tokens=1000)
    work_lists, n_tokens, batch = SETUP.work(point)
    assert len(work_lists.items) * batch == 8 * 4 * 3 and n_tokens == 1000
    assert (work_lists.items[:, Item.FULL_STEPS] == 2).all()
    assert (work_lists.items[:, Item.STEPS] == (2 if rank is None else 7)).all()
    assert work_lists.keys.max() < 1000
    seen = cost_model.describe(work_lists, truth(), batch, 64, "bfloat16")
    assert seen.rank == rank and seen.scattered > 0.7
    assert seen.apart == pytest.approx(1 - 1 / len(work_lists.items) if own_masks else 0.0)
    last = work_lists.items[-1]
    assert last[Item.FIRST_ROW] + last[Item.ROWS] <= n_tokens
    if rank in (0, 2):
        assert last[Item.MASK_STEP] + 5 <= len(work_lists.bias_index)
    elif rank == 1:
        assert last[Item.MASK_STEP] + 5 <= len(work_lists.intervals)
    elif rank:
        assert last[Item.MASK_STEP] + 5 <= len(work_lists.right) and last[Item.LEFT_FACTOR] < len(work_lists.left)


class Interpreted(calibration.Gpu):
    """Triton's interpreter, or a GPU, with times that are counted instead."""

    device = TRITON_DEVICE

    def __init__(self, tile, head_dim, dtype):
        self.tile, self.head_dim, self.dtype = tile, head_dim, getattr(torch, dtype)
        self.facts = {"multiprocessors": 1, "l2_bytes": 1 << 16}
        self._size, self._tokens = None, ()

    def resources(self, lists):
        self.run(lists, calibration.FEW_TOKENS, 1)
        return NEEDS | {"resident": 1.0}

    def timed(self, lists, n_tokens, batch):
        return self.run(lists, n_tokens, batch), 0.0

    def run(self, lists, n_tokens, batch):
        launch, tokens = self.prepared(lists, n_tokens, batch)
        tokens[3].fill_(torch.nan)
        launch(*tokens)
        rows = [slice(first, first + n) for first, n in lists.items[:, [Item.FIRST_ROW, Item.ROWS]].tolist()]
        assert not any(tokens[3][:, :, row].isnan().any() for row in rows), "rows were not written"
        return 5.0 + batch * float((2 + lists.items[:, Item.STEPS]).sum())


def test_every_launch_of_a_calibration_runs(monkeypatch):
    for name, value in {"NEAR_TOKENS": 128, "WAVES": (1, 2, 3), "STEPS": ((1, 1), (2, 1), (1, 2))}.items():
        monkeypatch.setattr(calibration_fit, name, value)
    monkeypatch.setattr(calibration_fit, "FEW_TOKENS", 64)
    monkeypatch.setattr(calibration, "FEW_TOKENS", 64)
    found = calibration.measure(Interpreted(tiles.parse("16x1"), 16, "float32"), {})
    assert found.launch_us == pytest.approx(5.0, abs=2.1)
    assert found.kernel(16).steady_us == pytest.approx((2.0, 1.0, 1.0), abs=0.1)
    assert len(found.timings) > 30 and {timing["rank"] for timing in found.timings} == set(VARIANTS)
    assert asdict(found)["kernels"][0]["resident"] == 1


@pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="times a GPU, and this machine has none")
def test_a_plan_takes_what_is_predicted():
    plan = tw.plan(models.build("vil-tiny-256-s1-exact"), heads=6, head_dim=64, dtype=torch.bfloat16, device="cuda")
    assert all(profile.source == "predicted" for profile in plan.profiles.values())
    q, k, v = (torch.randn(1, 6, plan.graph.n_rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    us = time_gpu(lambda: plan(q, k, v, ordered=True), min_reps=10, max_seconds=0.2, rse_target=0.02).p50_us
    assert plan.schedule.predicted_us == pytest.approx(us, rel=0.4)


def test_launches_are_played_through_alike_by_compiled_code():
    generator = np.random.default_rng(0)
    first, of_item = 0.1 + generator.random((4, 3)), generator.integers(0, 4, 60)
    launch = first, 0.9 * first, of_item, 3, 7, np.tril(0.2 + generator.random((3, 3)))
    assert cost_model.played(*launch) == cost_model._compiled()(*launch)
