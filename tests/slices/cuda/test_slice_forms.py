"""Forms of attention to slices: candidates, the search among them, and who takes what it found."""

import json
import types
from dataclasses import replace

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright import reference
from tilewright.attention.cuda import calibration, forms
from tilewright.core.errors import ArtifactError, DeviceError
from tilewright.slices.cuda import config, form_search
from tilewright.slices.cuda import forms as slice_forms
from tilewright.slices.cuda.config import SliceConfig
from tilewright.slices.cuda.forms import Kind

KIND = Kind(128, 1, 128, "bfloat16")
GPU = torch.device("cuda", 0)
SHARED = {(9, 0): 227 << 10, (8, 0): 163 << 10, (8, 9): 99 << 10}


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_candidates_fit_the_device(capability, dtype, rows, head_dim):
    given = rows, head_dim, dtype, capability, SHARED[capability]
    found = config.candidates(*given)
    assert found[0] == config.for_slices(*given) and 1 < len(set(found)) == len(found)
    assert all(config.shared_bytes(form, rows, head_dim, dtype.itemsize) <= given[-1] for form in found)
    assert any(form.by_warps for form in found) == (capability == (9, 0) and rows == 128 and dtype.itemsize == 2)
    # Scores of a step and sums, 32 bits each, leave a thread registers for the rest.
    plain = [form for form in found if not form.by_warps]
    assert all(rows * (form.step_keys + head_dim) / (32 * form.num_warps) < 256 for form in plain)


@pytest.mark.parametrize("change", [{"step_keys": None}, {"warps": 4}, {"num_warps": -1}], ids=str)
def test_a_form_that_is_none_is_refused(change):
    stated = {**forms.as_stated(SliceConfig(64, 3, 8)), **change}
    with pytest.raises(ArtifactError, match="form of attention to slices: expected step_keys, num_stages"):
        config.read(stated)


def test_a_form_is_read_as_it_was_stated():
    form = SliceConfig(64, 4, 4, by_warps=True, loose=True)
    assert config.read(json.loads(json.dumps(forms.as_stated(form)))) == form


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A made-up GPU, and an empty cache; `us`: what a launch takes, by form."""
    facts = types.SimpleNamespace(
        name="Made-up GPU", major=9, minor=0, multi_processor_count=8, shared_memory_per_block_optin=227 << 10
    )
    made = types.SimpleNamespace(us=lambda form: 10.0, wrong=(), facts=facts, timed=0)

    def timed(kind, form):
        made.timed += 1
        return iter([made.us(form), 3 * made.us(form)])

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made.facts)
    monkeypatch.setattr(forms, "_HELD", {})
    monkeypatch.setattr(calibration, "side_by_side", lambda module, head_dim, dtype, jobs: set(jobs))
    monkeypatch.setattr(form_search, "_device", lambda: GPU)
    monkeypatch.setattr(form_search, "timed", timed)
    monkeypatch.setattr(form_search, "checked", lambda kind, form, device: float(form in made.wrong))
    return made


def test_the_fastest_form_that_is_right_is_kept(gpu, monkeypatch):
    default, wrong, best, *_ = slice_forms.candidates(KIND, GPU)
    gpu.us, gpu.wrong = lambda form: {wrong: 1.0, best: 5.0}.get(form, 10.0), (wrong,)
    assert slice_forms.of(KIND, GPU) == default
    form_search.search(128, "bfloat16")
    assert slice_forms.of(KIND, GPU) == best
    # From the file, in a process that has not searched; for these lists, this type and device alone.
    monkeypatch.setattr(forms, "_HELD", {})
    assert slice_forms.of(KIND, GPU) == best
    for other in (replace(KIND, width=16), replace(KIND, head_dim=64), replace(KIND, dtype="float16")):
        assert slice_forms.of(other, GPU) == slice_forms.candidates(other, GPU)[0]
    tried = gpu.timed
    form_search.search(128, "bfloat16")
    assert gpu.timed == tried, "once"
    gpu.facts = types.SimpleNamespace(**{**vars(gpu.facts), "name": "Another GPU"})
    assert slice_forms.of(KIND, GPU) == default


def test_lists_keep_one_form(gpu, monkeypatch):
    """Also where short lists have another than long ones."""
    _, one, other, *_ = slice_forms.candidates(KIND, GPU)
    us = {one: (5.0, 50.0), other: (20.0, 10.0)}
    monkeypatch.setattr(form_search, "timed", lambda kind, form: iter(us.get(form, (10.0, 30.0))))
    form_search.search(128, "bfloat16", kinds=[(KIND.rows, KIND.width)])
    stated = slice_forms.made_for(KIND, GPU)
    assert forms.held(forms.path_of(stated), stated, read=config.read).forms == (forms.as_stated(other),)
    assert slice_forms.of(KIND, GPU) == other


def test_what_is_hardly_faster_does_not_replace_the_default(gpu):
    default, other, *_ = slice_forms.candidates(KIND, GPU)
    gpu.us = lambda form: 9.9 if form == other else 10.0
    form_search.search(128, "bfloat16")
    assert slice_forms.of(KIND, GPU) == default


def test_a_form_that_its_own_process_did_not_check_is_not_tried(gpu, monkeypatch):
    default, other, *_ = slice_forms.candidates(KIND, GPU)
    gpu.us = lambda form: 1.0 if form == other else 10.0
    monkeypatch.setattr(calibration, "side_by_side", lambda module, head_dim, dtype, jobs: set(jobs[2:]))
    form_search.search(128, "bfloat16", kinds=[(128, 1)])
    assert slice_forms.of(KIND, GPU) == default


def test_lists_that_no_form_serves_are_refused(gpu):
    gpu.wrong = slice_forms.candidates(KIND, GPU)
    with pytest.raises(DeviceError, match="slices 128x1: expected a form that runs on this GPU, found wrong"):
        form_search.search(128, "bfloat16")


def test_head_dims_without_such_kernels_are_left_out(gpu):
    form_search.search(32, "bfloat16")
    assert gpu.timed == 0


@pytest.mark.parametrize("rows, width", [(32, 1), (128, 64)])
def test_every_plain_candidate_attends_rightly(monkeypatch, rows, width):
    monkeypatch.setattr(form_search, "CHECKED_TOKENS", 333)
    monkeypatch.setattr(form_search, "HEADS", 1)
    kind, device = Kind(rows, width, 64, "float16"), torch.device(TRITON_DEVICE)
    for form in slice_forms.candidates(kind, device)[:4]:
        if not form.by_warps:
            assert form_search.checked(kind, form, device) <= reference.TOLERANCE[torch.float16], form


def test_a_wrong_kernel_is_seen(monkeypatch):
    monkeypatch.setattr(form_search, "CHECKED_TOKENS", 200)
    prepared = form_search.prepared

    def one_key_less(kind, form, counts, n_tokens, device):
        call = prepared(kind, form, (counts - 1).clamp(min=0), n_tokens, device)[0]
        return call, *prepared(kind, form, counts, n_tokens, device)[1:]

    monkeypatch.setattr(form_search, "prepared", one_key_less)
    kind = Kind(64, 1, 64, "float16")
    error = form_search.checked(kind, SliceConfig(32, 2, 4), torch.device(TRITON_DEVICE))
    assert error > reference.TOLERANCE[torch.float16]


def test_a_process_names_the_candidates_that_are_right(monkeypatch, capsys):
    monkeypatch.setattr(form_search, "_device", lambda: GPU)
    found = config.candidates(128, 128, torch.bfloat16, (9, 0), SHARED[9, 0])
    wrong, broken = found[1], found[-1]

    def checked(kind, form, device):
        assert kind == KIND
        if form == broken:
            raise RuntimeError("PassManager")
        return float("nan") if form == wrong else 0.0

    monkeypatch.setattr(form_search, "checked", checked)
    jobs = [form_search.OfSlices(KIND).job(form) for form in found]
    form_search._compile("128", "bfloat16", *jobs)
    assert capsys.readouterr().out.split() == [job for job in jobs if job not in (jobs[1], jobs[-1])]
