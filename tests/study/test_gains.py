"""The experiment gains: forms and ways of calling that are compared before they are timed, and what its table says."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import synthetic
from helpers.checkout import ALL, merged
from tilewright import networks
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright_study import config, sections
from tilewright_study.experiments import gains
from tilewright_study.experiments.gains import run as _gains
from tilewright_study.experiments.gains import table_gains
from tilewright_study.measure.effort import Run
from tilewright_study.tables import _quoted

HOW = Run("cpu", "float32", 0, 1.0, 3)


def run(case="vil-tiny-64", how=HOW, **forms):
    stated = gains.Settings(forms=forms, batches=(1, 2), window=15, max_seconds=0.001)
    found = list(_gains.run(case, stated, how))
    # Every column is declared, and has its type.
    assert all(gains.Row.of(row) for row in found)
    return found


# Rows


def test_every_form_is_compared_and_timed_and_what_needs_a_gpu_says_so():
    rows = run(tilewright=("eager", "graph"), native=("eager", "reduce-overhead"), full=("eager",))
    assert len(rows) == 10
    for row in rows:
        if row["way"] == "eager":
            assert row["status"] == "ok" and row["p50_us"] > 0 and row["relative_error"] <= row["tolerance"]
        else:
            assert row["status"] == "skipped" and "needs a GPU" in row["reason"] and "p50_us" not in row
    assert len({row["parameters"] for row in rows}) == 1


def test_a_form_with_other_logits_has_no_time(monkeypatch):
    made = _gains._own

    def changed(*given):
        forms, *rest = made(*given)
        forms["native"].register_forward_hook(lambda module, images, logits: 1.001 * logits)
        return forms, *rest

    monkeypatch.setattr(_gains, "_own", changed)
    for row in run(tilewright=("eager",), native=("eager",)):
        assert (row["status"] == "ok") == ("p50_us" in row) == (row["form"] == "tilewright")
        assert row["status"] == "ok" or "from those of the oracle" in row["reason"]


def test_calls_that_compile_come_last_and_forms_side_by_side():
    stated = gains.Settings({"flex": ("eager",), "a": gains.WAYS, "b": ("graph", "compile")}, (1, 8), 15, 0.1)
    found = _gains.calls(stated, 8)
    assert len(set(found)) == len(found) == 7
    assert found[:3] == [("a", 8, "eager"), ("a", 8, "graph"), ("b", 8, "graph")]
    assert [way in gains.COMPILED for _, _, way in found[3:]] == [True] * 3 + [False]
    assert found[-1] == ("flex", 8, "eager")


def test_without_timm_every_row_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    rows = run("timm-vit_tiny_patch16_224-64", tilewright=("eager",), full=("eager",))
    assert len(rows) == 4
    assert all(row["status"] == "skipped" and "timm cannot be imported" in row["reason"] for row in rows)


def test_networks_of_timm_have_a_window_that_fits_and_the_oracle_of_their_form():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    assert timm
    rows = run("timm-vit_tiny_patch16_224-64", tilewright=("eager",), dense=("eager",), full=("eager",))
    assert all(row["status"] == "ok" and row["pattern"] == "window-3-g1" for row in rows)
    # Windows are another function than attention to all keys.
    stated = gains.Settings({"tilewright": ("eager",), "full": ("eager",)}, (1,), 15, 0.1)
    made = _gains.Case("timm-vit_tiny_patch16_224-64", stated, HOW)
    logits = [made.oracles[form].logits for form in ("tilewright", "full")]
    assert not torch.allclose(*logits, atol=1e-2)


# Configuration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workloads": ["timm-vit_base"]}, "gains.workloads: expected timm-<model>-<pixels>, found 'timm-vit_base'"),
        (
            {"forms": {}},
            "gains.forms.vision_longformer: expected tilewright or ragged and another form, found none",
        ),
        ({"window": 4}, "gains.window: expected an odd number of tokens, found 4"),
        ({"batches": [1, 1]}, "gains.batches: 1 appears twice"),
        ({"max_seconds": 0}, "gains.max_seconds: "),
    ],
)
def test_a_section_names_what_is_wrong(change, message):
    stated = merged(ALL)
    stated["gains"] = {**stated["gains"], **change}
    with pytest.raises(ConfigError, match=message):
        config.load(stated | {"experiments": ["gains"]})


def test_forms_are_what_networks_of_a_family_can_exchange():
    assert {name: gains.known(name) for name in networks.NAMES} == {
        name: networks.exchanged(name)[1] for name in networks.NAMES
    }


def test_names_are_those_of_networks_and_of_timm():
    assert gains.parse("timm-vit_base_patch16_224-512") == (
        "timm",
        {"variant": "vit_base_patch16_224", "image_size": 512},
    )
    assert gains.parse("vil-tiny-224")[0] == "vision_longformer"
    with pytest.raises(UnknownNameError, match="unknown network 'pie'"):
        gains.parse("pie")
    assert isinstance(gains.Settings({}, (1,), 15, 0.1), sections.Section)


# The table

US = st.one_of(st.none(), st.floats(100, 1e5))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(US, US, US), min_size=4, max_size=4))
def test_each_way_is_compared_with_the_fastest_other_form_of_that_way(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("gains") / "vil-tiny-224.csv"
    rows = [
        synthetic.gains_row("vil-tiny-224", form, way, 1, us)
        for way, each in zip(gains.WAYS, times, strict=True)
        for form, us in zip(("tilewright", "native", "full"), each, strict=True)
    ]
    synthetic.write_csv(path, "gains", rows)
    (row,) = table_gains.table([path]).to_dict("records")
    for way, (own, *others) in zip(gains.WAYS, times, strict=True):
        known = {us: form for us, form in zip(others, ("native", "full"), strict=True) if us is not None}
        if own is None or not known:
            assert not row[f"over {way}"] > 0 and row[f"verdict {way}"] == ""
            continue
        assert row[f"over {way}"] == pytest.approx(min(known) / own)
        assert row[f"peer_us {way}"] == pytest.approx(min(known)) and row[f"us {way}"] == pytest.approx(own)
        if len(known) == 2:
            assert row[f"peer {way}"] == known[min(known)]
        beyond = abs(min(known) / own - 1) > 2 * (min(known) / own) * 0.01 * 2**0.5
        assert (row[f"verdict {way}"] != "tie") == beyond or own < min(known) * 1.06
    assert (row["reason"] == "") == all(own is not None for own, *_ in times)


def test_a_document_quotes_each_way_by_size_with_both_batches_in_a_cell(tmp_path):
    rows = [
        synthetic.gains_row("timm-vit_base_patch14_dinov2-518", form, way, batch, us, resolution=518)
        for way, batch, form, us in [
            ("eager", 1, "tilewright", 200.0),
            ("eager", 1, "full", 250.0),
            ("graph", 1, "tilewright", 100.0),
            ("graph", 1, "full", 150.0),
            ("graph", 8, "tilewright", 100.0),
            ("graph", 8, "full", 75.0),
            ("compile", 1, "tilewright", 100.0),
        ]
    ]
    synthetic.write_csv(tmp_path / "expected/h200/gains.csv", "gains", rows)
    assert _quoted.quoted("h200-gains", tmp_path).splitlines()[2:] == [
        "| timm DINOv2-B | called |  |  | 1.25 / – |  |  |",
        "| timm DINOv2-B | CUDA graph |  |  | 1.50 / 0.75 |  |  |",
    ]
