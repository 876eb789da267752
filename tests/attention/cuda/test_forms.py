"""Forms of the GPU's kernel: candidates, the search among them, and who takes what it found."""

import json
import types
from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import OutOfResources
from triton.errors import TritonError

from helpers import plans
from helpers.gpu import TRITON_DEVICE
from tilewright import __main__ as command
from tilewright import devices, reference
from tilewright.attention import backends, profile, schedule
from tilewright.attention.blocks import tiles
from tilewright.attention.cuda import calibration, config, forms
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.cuda.cost import form_search
from tilewright.attention.cuda.cost.calibration_points import Setup
from tilewright.attention.cuda.tile_lists import Item
from tilewright.attention.measure import measure
from tilewright.core.errors import ArtifactError, DeviceError, TileError

TILE = tiles.parse("64x1")
DEVICE = {
    "kind": "cuda",
    "name": "Made-up GPU",
    "capability": "8.0",
    "multiprocessors": 8,
    "driver": "1.2",
    "l2_bytes": 1 << 23,
    "launch_us": 1.0,
    "fork_us": 2.0,
    "registers": 1 << 16,
    "shared_bytes": 163 << 10,
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2.0"},
}
DTYPES = {name: getattr(torch, name) for name in profile.DTYPES}


# Candidates


@given(
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1, 8, 16, 64, 128]),
    st.sampled_from(sorted(config.HEAD_DIMS)),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([48 << 10, 99 << 10, 163 << 10, 227 << 10]),
)
def test_candidates_fit_the_device(rows, keys, head_dim, dtype, shared_bytes):
    tile, room = tiles.Tile(rows, keys), config.Room(shared_bytes, 1 << 16)
    found = config.candidates(tile, head_dim, DTYPES[dtype], room)
    assert 1 <= len(set(found)) == len(found)
    assert found[0] == config.for_tile(tile, head_dim, DTYPES[dtype], room)
    row_bytes = sum(config.HEAD_DIMS[head_dim]) * DTYPES[dtype].itemsize
    assert len(found) <= 10
    for form in found:
        assert form.step_keys % tile.run == 0 and form.num_warps in (1, 2, 4, 8)
        if form != found[0]:
            assert (2 * form.num_stages * form.step_keys + rows) * row_bytes <= shared_bytes
        if form.maxnreg is not None:
            assert form.maxnreg % 8 in (0, 7) and 32 * form.num_warps * form.maxnreg <= room.registers
        # One choice differs from the default; registers of a thread follow the number of its threads.
        differing = {name for name, value in asdict(form).items() if value != asdict(found[0])[name]}
        assert len(differing) <= 1 or differing <= {"num_warps", "maxnreg"}


def test_less_shared_memory_has_fewer_stages():
    large, small = (
        config.for_tile(tiles.parse("128x128"), 128, torch.bfloat16, config.Room(kb << 10, 1 << 16))
        for kb in (227, 163)
    )
    assert (large.num_stages, small.num_stages) == (2, 1)


def test_fewer_registers_leave_fewer_to_a_thread():
    one, half = (config.for_tile(TILE, 64, torch.float16, config.Room(227 << 10, n)) for n in (1 << 16, 1 << 15))
    assert (one.maxnreg, half.maxnreg) == (128, 64)


@pytest.mark.parametrize("change", [{"step_keys": 0}, {"warps": 4}, {"num_warps": None}, {"num_stages": "2"}], ids=str)
def test_a_form_that_is_none_is_refused(change):
    stated = {**asdict(config.KernelConfig()), **change}
    with pytest.raises(ArtifactError, match="form of a kernel: expected above zero maxnreg"):
        config.read(stated)


# The search


class MadeUp:
    """A GPU whose times and failures follow from the form; see `search`. us: of a form, in all launches or in those
    with and without masks."""

    us, fails, wrong = staticmethod(lambda form: 10.0), {}, ()
    made = 0

    def __init__(self, tile, head_dim, dtype, form):
        self.form, self.dtype = form, getattr(torch, dtype)
        self.setup = Setup(tile.rows, form.step_keys, head_dim, dtype, 8, 1 << 23)
        type(self).made += 1
        if form in self.fails:
            raise self.fails[form]

    def timed(self, lists, n_tokens, batch):
        masked = (lists.items[:, Item.FULL_STEPS] < lists.items[:, Item.STEPS]).any()
        return float(np.broadcast_to(self.us(self.form), 2)[0 if masked else 1]), 0.0


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A made-up GPU, and an empty cache."""

    class Own(MadeUp):
        pass

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "describe", lambda kind: DEVICE)
    monkeypatch.setattr(forms, "_HELD", {})
    monkeypatch.setattr(calibration, "_HELD", {})
    monkeypatch.setattr(calibration, "Gpu", Own)
    monkeypatch.setattr(calibration, "side_by_side", lambda module, head_dim, dtype, jobs: set(jobs))
    monkeypatch.setattr(form_search.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(form_search, "checked", lambda gpu: 1.0 if gpu.form in Own.wrong else 0.0)
    return Own


def among(head_dim=64):
    return config.candidates(TILE, head_dim, torch.bfloat16, forms.room(DEVICE))


def searched(head_dim=64, **options):
    """The form that is used after a search, the only one that is kept, and the trials."""
    (found,), trials = kept(head_dim, **options)
    return found, trials


def kept(head_dim=64, **options):
    """The forms that are kept after a search, and the trials."""
    form_search.search([TILE], head_dim, "bfloat16", **options)
    found = forms.kept(TILE, head_dim, torch.bfloat16)
    stated = forms.made_for(TILE, head_dim, "bfloat16")
    choice = forms.held(forms.path_of(stated), stated)
    assert forms.of(TILE, head_dim, torch.bfloat16) == found[0]
    assert choice.forms == tuple(map(asdict, found)) == backends.forms("cuda", TILE, head_dim, "bfloat16")
    assert len(choice.trials) == len(among(head_dim))
    return found, choice.trials


@pytest.mark.parametrize("best", range(9))
def test_the_fastest_form_is_kept(gpu, monkeypatch, best):
    gpu.us = staticmethod(lambda form: 5.0 if form == among()[best] else 10.0)
    assert forms.of(TILE, 64, torch.bfloat16) == among()[0], "the default before a search"
    found, trials = searched()
    assert found == among()[best] and [trial.status for trial in trials] == ["ok"] * 9
    # From the file, in a process that has not searched; and for this head dim, type and device alone.
    monkeypatch.setattr(forms, "_HELD", {})
    assert forms.of(TILE, 64, torch.bfloat16) == found
    assert forms.of(TILE, 32, torch.bfloat16) == among(32)[0]
    made = gpu.made
    searched()
    assert gpu.made == made, "once"
    searched(anew=True)
    assert gpu.made == 2 * made
    monkeypatch.setattr(devices, "describe", lambda kind: {**DEVICE, "driver": "1.3"})
    assert forms.of(TILE, 64, torch.bfloat16) == among()[0]


def test_each_launch_counts_alike(gpu, monkeypatch):
    """Half of a short launch and a tenth more of a long one is faster."""
    times = iter([10.0, 1000.0, 5.0, 1100.0] + [10.0, 1000.0] * 7)
    monkeypatch.setattr(gpu, "timed", lambda self, *work: (next(times), 0.0))
    assert kept()[0] == (among()[1], among()[0])


# Times of forms with and without masks, by place among the candidates, where the default takes 10 and 100; and the
# places of those that are kept.
LAUNCHES = {
    "each launch has its own": ({1: (8.0, 120.0), 2: (12.0, 79.0)}, (2, 1)),
    "the best compromise is neither's": ({1: (8.0, 120.0), 2: (12.0, 79.0), 3: (8.1, 80.0)}, (2, 1)),
    "one is best in both": ({4: (9.0, 90.0)}, (4,)),
    "hardly better with masks": ({1: (9.9, 150.0), 2: (11.0, 80.0)}, (2, 0)),
    "hardly worse with masks": ({2: (10.1, 80.0)}, (2,)),
    "better without masks alone": ({2: (15.0, 90.0)}, (0, 2)),
    "better with masks alone": ({2: (9.0, 150.0)}, (0, 2)),
    "hardly better at all": ({2: (9.9, 99.0)}, (0,)),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_the_fastest_form_of_each_launch_is_kept(gpu, monkeypatch, case):
    us, places = LAUNCHES[case]
    gpu.us = staticmethod(lambda form: us.get(among().index(form), (10.0, 100.0)))
    found, _ = kept()
    assert found == tuple(among()[place] for place in places)
    monkeypatch.setattr(forms, "_HELD", {})
    assert forms.kept(TILE, 64, torch.bfloat16) == found, "from the file"


@given(st.lists(st.tuples(*[st.floats(1.0, 2.0)] * 2), min_size=1, max_size=9), st.sampled_from([1, 2]))
def test_a_third_form_is_never_kept_and_no_launch_is_much_slower_than_its_best(times, most):
    tried = [forms.Trial({"step_keys": place}, "ok", us) for place, us in enumerate(times)]
    found = form_search._kept(tried, tried[0], most)
    assert 1 <= len({trial.form["step_keys"] for trial in found}) == len(found) <= most
    if most == 2:
        # What is left out for the default, and for the first.
        allowed = (1 - form_search.MARGIN) ** -2 + 1e-9
        for launch in (0, 1):
            assert min(each.us[launch] for each in found) <= allowed * min(us[launch] for us in times)


def test_a_form_that_fails_is_not_the_default(gpu):
    gpu.fails = {among()[0]: DeviceError("too large")}
    gpu.us = staticmethod(lambda form: {among()[1]: (8.0, 120.0), among()[2]: (12.0, 79.0)}.get(form, (10.0, 100.0)))
    assert kept()[0] == (among()[2], among()[1])


def test_what_is_hardly_faster_does_not_replace_the_default(gpu):
    gpu.us = staticmethod(lambda form: 9.9 if form == among()[3] else 10.0)
    assert searched()[0] == among()[0]


def test_forms_that_fail_or_attend_wrongly_are_dropped(gpu):
    out, compiler, run, wrong, *_ = among()[1:]
    gpu.us = staticmethod(lambda form: {among()[0]: 10.0, among()[6]: 9.0}.get(form, 11.0))
    gpu.fails = {
        out: DeviceError("tile 64x1: expected to need at most 1 of this device's shared memory"),
        compiler: TritonError("PassManager::run failed\nand more"),
        run: RuntimeError("an illegal instruction"),
    }
    gpu.wrong = (wrong,)
    found, trials = searched()
    assert found == among()[6]
    assert [trial.status.partition(":")[0] for trial in trials[:5]] == [
        *("ok", "DeviceError", "TritonError", "RuntimeError", "wrong"),
    ]
    assert not any(trial.us for trial in trials[1:5]) and "\n" not in trials[2].status


def test_a_candidate_that_breaks_its_compiler_is_not_tried_here(gpu, monkeypatch):
    fast = among()[1]
    gpu.us = staticmethod(lambda form: 1.0 if form == fast else 10.0)
    monkeypatch.setattr(calibration, "side_by_side", lambda module, head_dim, dtype, jobs: set(jobs[2:]))
    found, trials = searched()
    assert found == among()[0] and trials[1].status == "not compiled" and trials[0].status == "ok"


def test_a_default_that_does_not_fit_is_replaced(gpu):
    gpu.fails = {among()[0]: DeviceError("too large")}
    gpu.us = staticmethod(lambda form: 3.0 if form == among()[4] else 10.0)
    assert searched()[0] == among()[4]


def test_a_tile_that_no_form_fits_is_refused(gpu):
    gpu.fails = {form: DeviceError("too large") for form in among()}
    with pytest.raises(DeviceError, match="tile 64x1: expected a form that runs on this GPU, found DeviceError: too l"):
        form_search.search([TILE], 64, "bfloat16")


def test_few_cores_compile_few_candidates(gpu, monkeypatch):
    monkeypatch.setattr(form_search.os, "sched_getaffinity", lambda pid: {0})
    tried = []
    monkeypatch.setattr(calibration, "side_by_side", lambda m, h, d, jobs: tried.extend(jobs) or set(jobs))
    form_search.search([TILE, tiles.parse("32x1")], 64, "bfloat16")
    assert len(tried) == 2 * 4 == len(set(tried))


@pytest.mark.parametrize("damage", ["cut", "foreign", "form", "none", "three", "twice", "older"])
def test_a_broken_file_is_replaced_with_one_line(gpu, monkeypatch, caplog, damage):
    gpu.us = staticmethod(lambda form: 5.0 if form == among()[2] else 10.0)
    searched()
    stated = forms.made_for(TILE, 64, "bfloat16")
    path = forms.path_of(stated)
    text, document = path.read_text(), json.loads(path.read_text())
    (form,) = document["forms"]
    changes = {
        "form": {"forms": [form | {"num_warps": 0}]},
        "none": {"forms": []},
        "three": {"forms": [form | {"num_warps": n} for n in (1, 2, 4)]},
        "twice": {"forms": [form, form]},
        # As it was before, with one form.
        "older": {"form": form, "version": 1},
    }
    broken = {"cut": text[:99], "foreign": text.replace("Made-up", "Another")}
    path.write_text(broken[damage] if damage in broken else json.dumps(document | changes[damage]))
    monkeypatch.setattr(forms, "_HELD", {})
    assert forms.of(TILE, 64, torch.bfloat16) == among()[0]
    assert searched()[0] == among()[2]
    (record,) = caplog.records
    assert "chosen anew" in record.getMessage() and str(path) in record.getMessage()
    assert "\n" not in record.getMessage()


def test_launches_hold_as_many_keys_in_each_form():
    for keys in (32, 64, 128):
        setup = Setup(64, keys, 64, "bfloat16", 8, 1 << 23)
        window, kept = form_search.points(setup)
        assert keys * (window.partial - 1) < 484 <= keys * window.partial and keys * kept.full == 4096
        for point in (window, kept):
            lists, _, batch = setup.work(point)
            assert len(lists.items) * batch == 8 * 12 and lists.rank == 16 and not len(lists.parts)


def test_the_command_chooses_forms_when_asked(gpu, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(form_search, "search", lambda *arguments: asked.append(arguments))
    found = types.SimpleNamespace(made_for={}, rows=64, error=0.0, spread=0.0, seconds=1.0, kernels=())
    found.kernel = lambda rank: types.SimpleNamespace(registers=1, resident=1, steady_us=(1, 1, 1))
    monkeypatch.setattr(calibration, "of", lambda chosen, head_dim, dtype, anew: {"64x1": (found, found)})
    assert command.main(["calibrate", "--tiles", "64x1"]) == 0 and not asked
    assert command.main(["calibrate", "--tiles", "64x1", "--forms"]) == 0
    assert asked == [([TILE], 64, "bfloat16", False)]
    # A row for each form.
    assert capsys.readouterr().out.count("64x1") == 4


def test_another_form_has_another_calibration(gpu):
    one, other = (calibration.made_for(TILE, 64, "bfloat16", among()[place]) for place in (0, 3))
    assert other["num_stages"] == 3 != one["num_stages"]
    assert calibration.path_of(one) != calibration.path_of(other)


def test_each_form_is_calibrated(gpu, monkeypatch):
    gpu.us = staticmethod(lambda form: {among()[1]: (8.0, 120.0), among()[2]: (12.0, 79.0)}.get(form, (10.0, 100.0)))
    found, _ = kept()
    compiled, measured = [], []

    def measure(made, stated):
        measured.append(made.form)
        return types.SimpleNamespace(spread=0.0, made_for=stated)

    monkeypatch.setattr(calibration, "compile_ahead", lambda jobs, *kind: compiled.extend(jobs))
    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(calibration, "asdict", lambda made: asdict(made) if hasattr(made, "num_warps") else vars(made))
    calibrations = calibration.of([TILE], 64, "bfloat16")["64x1"]
    assert measured == list(found) and compiled == [(TILE, form) for form in found]
    assert [each.made_for["step_keys"] for each in calibrations] == [form.step_keys for form in found]
    calibration.of([TILE], 64, "bfloat16")
    assert len(measured) == 2, "once"


def test_a_form_is_read_from_a_word_as_it_was_written():
    for form in (*among(), *config.candidates(tiles.parse("128x64"), 64, torch.bfloat16, config.ANY_ROOM)):
        assert forms.from_word(forms.as_word(form)) == form and " " not in forms.as_word(form)


# Kernels, under the interpreter where there is no GPU


class Interpreted(calibration.Gpu):
    device = TRITON_DEVICE

    def __init__(self, tile, head_dim, dtype, form):
        self.tile, self.head_dim, self.dtype, self.form = tile, head_dim, getattr(torch, dtype), form
        self.facts = {"multiprocessors": 1, "l2_bytes": 1 << 16}
        self._size, self._tokens = None, ()


@pytest.mark.parametrize("tile", ["32x1", "64x64"])
def test_every_candidate_attends_rightly(monkeypatch, tile):
    for name, value in {"TOKENS": 384, "REACH": 128}.items():
        monkeypatch.setattr(form_search, name, value)
    for form in config.candidates(tiles.parse(tile), 16, torch.float16, config.ANY_ROOM):
        gpu = Interpreted(tiles.parse(tile), 16, "float16", form)
        assert form_search.checked(gpu) <= reference.TOLERANCE[torch.float16], form
        assert gpu.setup.step_keys == form.step_keys


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("keys", [1, 64])
def test_the_kernel_that_is_checked_is_the_one_that_is_timed(rows, keys):
    tile = tiles.Tile(rows, keys)
    for form in config.candidates(tile, 64, torch.bfloat16, config.ANY_ROOM):
        _, checked = form_search._small(tile, form.step_keys)
        setup = Setup(rows, form.step_keys, 64, "bfloat16", 8, 1 << 23)
        timed = [setup.work(point)[0] for point in form_search.points(setup)]
        for lists in (checked, setup.compiled(16, False), *timed):
            assert (lists.full, lists.partial, lists.rank, len(lists.parts)) == (True, True, 16, 0)
            assert (lists.rows, lists.step_keys) == (rows, form.step_keys)
        steps, full = checked.items[:, [Item.STEPS, Item.FULL_STEPS]].T
        assert (full > 0).any() and (steps > full).any()


def test_processes_say_what_they_have_done(monkeypatch):
    class Process:
        def __init__(self, command, env, stdout, stderr):
            for job in command[5::2]:
                print(job, file=stdout, flush=True)

        def wait(self, seconds):
            pass

    monkeypatch.setattr(calibration.subprocess, "Popen", Process)
    monkeypatch.setattr(calibration.os, "sched_getaffinity", lambda pid: {0})
    jobs = [form_search._job(TILE, form) for form in among()]
    assert calibration.side_by_side(form_search.__name__, 64, "bfloat16", jobs) == set(jobs[::2])


def test_a_process_compiles_all_candidates_that_it_can(monkeypatch, capsys):
    class Own(MadeUp):
        fails: ClassVar = {among()[1]: DeviceError("too large"), among()[2]: RuntimeError("PassManager")}

        def resources(self, lists):
            assert self.setup.step_keys == self.form.step_keys == lists.step_keys

    monkeypatch.setattr(calibration, "Gpu", Own)
    jobs = [form_search._job(TILE, form) for form in among()]
    form_search._compile("64", "bfloat16", *jobs)
    assert capsys.readouterr().out.split() == [jobs[0], *jobs[3:]]


def test_a_wrong_kernel_is_seen(monkeypatch):
    form = config.for_tile(TILE, 16, torch.float32)
    gpu = Interpreted(TILE, 16, "float32", form)
    prepared = gpu.prepared

    def shorter(lists, n_tokens, batch):
        items = lists.items.copy()
        items[:, Item.STEPS] -= 1
        return prepared(replace(lists, items=items), n_tokens, batch)

    gpu.prepared = shorter
    assert not form_search.checked(gpu) <= reference.TOLERANCE[torch.float32]


def test_what_is_too_large_is_named(monkeypatch):
    monkeypatch.setattr(form_search, "checked", lambda gpu: (_ for _ in ()).throw(OutOfResources(9, 1, "registers")))
    monkeypatch.setattr(calibration, "Gpu", Interpreted)
    trial = form_search._tried(TILE, 16, "float32", config.KernelConfig())
    assert trial.status.startswith("OutOfResources: out of resource: registers") and not trial.us


# Who takes them


def test_a_schedule_runs_with_the_forms_that_it_states():
    dense = plans.pattern(100, 90)
    qkv = [torch.randn(1, 2, n, 16, device=TRITON_DEVICE) for n in (100, 90, 90)]
    pattern = plans.reordered(dense)
    cover = plans.covers(pattern, ["16x1", "32x1"])
    form = asdict(config.KernelConfig(step_keys=32, num_warps=1))
    found = plans.scheduled(cover)
    options = {"heads": 2, "head_dim": 16, "dtype": torch.float32, "device": TRITON_DEVICE}
    options |= {"row_order": pattern.row_order, "col_order": pattern.col_order}
    expected = reference.attention(*(x.cpu() for x in qkv), torch.from_numpy(dense))
    for stated, keys in (((form, form), {32}), ((), {64})):
        call = cuda_executor.prepare(replace(found, forms=stated), cover, **options)
        assert {launch.lists.step_keys for launch in call.launches} == keys
        assert reference.relative_error(call(*qkv).cpu(), expected) <= reference.TOLERANCE[torch.float32]
    with pytest.raises(ArtifactError, match="form of a kernel"):
        cuda_executor.prepare(replace(found, forms=({"step_keys": 32},) * 2), cover, **options)


def test_a_schedule_states_the_forms_of_its_profiles(gpu, tmp_path):
    pattern = plans.reordered(plans.pattern(100, 90), heads=2, head_dim=16)
    cover = plans.covers(pattern, ["16x1", "32x1"])
    assert backends.forms("cpu", TILE, 64, "float32") == (None,)
    stated = [form for each in cover.values() for form in backends.forms("cuda", each.tile, 16, "bfloat16")]
    found = replace(plans.scheduled(cover), forms=tuple(stated))
    schedule.save(tmp_path / "s.json", found)
    assert schedule.load(tmp_path / "s.json").forms == found.forms
    document = json.loads((tmp_path / "s.json").read_text())
    del document["forms"]
    (tmp_path / "s.json").write_text(json.dumps(document))
    assert schedule.load(tmp_path / "s.json").forms == ()
    (tmp_path / "s.json").write_text(json.dumps(document | {"forms": stated[:1]}))
    with pytest.raises(ArtifactError, match="a form for each of the tiles"):
        schedule.load(tmp_path / "s.json")


def test_a_solved_schedule_states_the_forms_of_its_profiles():
    cover = plans.covers(plans.reordered(plans.pattern(100, 90), heads=2, head_dim=16), ["16x1", "32x1"])
    profiles = {name: measure(each, budget_s=0.05) for name, each in cover.items()}
    limits = devices.limits(profiles["16x1"].device)
    assert schedule.solve(cover, profiles, limits, solver="greedy").forms == ()
    stated = {name: asdict(config.KernelConfig(num_warps=n)) for n, name in enumerate(cover, start=1)}
    known = {name: replace(each, form=stated[name]) for name, each in profiles.items()}
    assert schedule.solve(cover, known, limits, solver="greedy").forms == tuple(stated.values())
    # Profiles of before state none: the device decides for all tiles.
    assert schedule.solve(cover, known | {"32x1": profiles["32x1"]}, limits, solver="greedy").forms == ()


def test_a_tile_of_too_few_rows_has_no_form():
    with pytest.raises(TileError, match="tile 8x1: expected at least 16 rows"):
        config.candidates(tiles.parse("8x1"), 32, torch.float16, config.ANY_ROOM)
