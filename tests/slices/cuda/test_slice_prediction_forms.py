"""Forms of the prediction of slices: candidates, the search among them, and who takes what it found."""

import json
import types
from dataclasses import replace

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright.attention.cuda import calibration, forms
from tilewright.core.errors import ArtifactError
from tilewright.slices.cuda import prediction_forms, prediction_search
from tilewright.slices.cuda.prediction_forms import Config, Kind
from tilewright.slices.cuda.selection import Selection

KIND = Kind("pool32", 128, 128, "bfloat16")
KINDS = [KIND, Kind("pool128", 128, 64, "float16"), prediction_forms.selecting()]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_candidates_are_distinct_and_the_default_is_first(kind):
    found = prediction_forms.candidates(kind)
    assert found[0] == Config() and 5 < len(set(found)) == len(found)


def test_float32_has_its_default_alone():
    assert len(prediction_forms.candidates(replace(KIND, dtype="float32"))) == 1


@pytest.mark.parametrize("change", [{"programs": None}, {"warps": 4}, {"num_warps": -1}], ids=str)
def test_a_form_that_is_none_is_refused(change):
    stated = prediction_forms.as_stated(Config()) | change
    with pytest.raises(ArtifactError, match="form of a prediction: expected block_m, block_n"):
        prediction_forms.read(stated)


def test_a_form_is_read_as_it_was_stated():
    form = Config(by_keys=False, counted=512)
    assert prediction_forms.read(json.loads(json.dumps(prediction_forms.as_stated(form)))) == form


def test_the_fastest_form_that_is_right_is_kept(monkeypatch, tmp_path):
    facts = types.SimpleNamespace(name="Made-up GPU", major=9, minor=0, multi_processor_count=8)
    default, wrong, best, *_ = prediction_forms.candidates(KIND)
    us = {wrong: 1.0, best: 5.0}
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(forms, "_HELD", {})
    monkeypatch.setattr(calibration, "side_by_side", lambda module, head_dim, dtype, jobs: set(jobs))
    monkeypatch.setattr(prediction_search, "_device", lambda: GPU)
    monkeypatch.setattr(prediction_search, "timed", lambda kind, form: iter([us.get(form, 10.0)]))
    monkeypatch.setattr(prediction_search, "checked", lambda kind, form, device: 9.0 * (form == wrong))
    assert prediction_forms.of(KIND, GPU) == default
    prediction_search.search(128, "bfloat16")
    monkeypatch.setattr(forms, "_HELD", {})
    assert prediction_forms.of(KIND, GPU) == best
    assert prediction_forms.of(replace(KIND, what="pool128"), GPU) != wrong
    assert prediction_forms.of(replace(KIND, what="pool16"), GPU) == Config()
    assert prediction_forms.of(prediction_forms.selecting(), GPU) == Config()


@pytest.mark.parametrize("what", ["pool128", "pool32"])
def test_every_kind_of_candidate_makes_right_codes(what, monkeypatch):
    monkeypatch.setattr(prediction_search, "CHECKED_TOKENS", 150)
    kind = Kind(what, 128, 64, "float16")
    found = prediction_forms.candidates(kind)
    for form in (found[1], found[-1]):
        assert prediction_search.checked(kind, form, torch.device(TRITON_DEVICE)) <= 1.0, form


def test_candidates_select_as_the_cpu_does_and_a_wrong_one_is_seen(monkeypatch):
    monkeypatch.setattr(prediction_search, "CHECKED_TOKENS", 600)
    kind, device = prediction_forms.selecting(), torch.device(TRITON_DEVICE)
    assert prediction_search.checked(kind, Config(counted=256, count_warps=2), device) == 0
    select = Selection.select
    monkeypatch.setattr(
        Selection,
        "select",
        lambda self, codes, rule, *lists: select(self, codes + 0 * codes, rule._replace(least=500), *lists),
    )
    assert prediction_search.checked(kind, Config(), device) > 0


def test_a_process_names_the_candidates_that_are_right(monkeypatch, capsys):
    monkeypatch.setattr(prediction_search, "_device", lambda: GPU)
    found = prediction_forms.candidates(KIND)

    def checked(kind, form, device):
        assert kind == KIND
        if form == found[-1]:
            raise RuntimeError("PassManager")
        return float("nan") if form == found[1] else 0.0

    monkeypatch.setattr(prediction_search, "checked", checked)
    jobs = [prediction_search.OfPrediction(KIND).job(form) for form in found]
    prediction_search._compile("128", "bfloat16", *jobs)
    assert capsys.readouterr().out.split() == [job for job in jobs if job not in (jobs[1], jobs[-1])]
