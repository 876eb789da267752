"""Passes of video networks in T5: checked before they are timed, weights that are missing said so, maps never mixed."""

import json

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_claims import verdicts
from test_figures import configured

from helpers import synthetic
from helpers.rows import whole
from tilewright import networks, slices
from tilewright.core import weight_files
from tilewright.core.errors import ConfigError
from tilewright.masks import wan as pattern
from tilewright.networks import wan
from tilewright_study import experiments
from tilewright_study.experiments import recall, video
from tilewright_study.experiments.recall import run as _recall
from tilewright_study.experiments.recall import table_recall as recall_table
from tilewright_study.experiments.video import run as _video
from tilewright_study.experiments.video import table_video as video_table
from tilewright_study.measure import weights as _weights
from tilewright_study.measure.effort import Run
from tilewright_study.scenes import captured
from tilewright_study.stages import video_pictures
from tilewright_study.training import video as training

NAME, OPTIONS, GRID = "wan-tiny-480p-5f", {"layers": 2, "height": 128, "width": 192}, (2, 8, 12)
QUICK = Run(rse=1.0, min_repetitions=3)
SLICES = video.Attention("slices", {"keep": 0.4, "budget": 0.4}, "hilbert", 2)
ATTENTION = {
    "dense": video.Attention("dense", {}, None, 1),
    "slices60": SLICES,
    "blocks60": video.Attention("blocks", {"keep": 0.4, "budget": 0.5}, "hilbert", 1),
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 128, 1, 2))


@pytest.fixture
def trained(tmp_path):
    """Weights of a training of two steps, at their path."""
    recipe = training.Recipe(stages=(training.Stage(steps=2, batch=1, clips=1, frames=1, height=4, width=4),))
    network = networks.create_video(NAME, **OPTIONS)
    training.train(network, lambda *_: torch.randn(1, 16, 1, 4, 4), recipe, tmp_path / "tiny.safetensors")
    return _weights.Weights(NAME, OPTIONS, str(tmp_path / "tiny.safetensors"), None)


def run(weights, attention=ATTENTION, **changes):
    stated = video.Settings(**{"modes": ("eager",), "sampler": 2, "max_seconds": 0.01} | changes, weights=weights,
                            attention=attention)  # fmt: skip
    return whole("video", _video.run("tiny", stated, QUICK))


# Rows


def test_every_attention_has_a_row_that_was_checked(trained):
    rows = run(trained)
    assert [row["attention"] for row in rows] == list(ATTENTION)
    dense, lists, blocks = rows
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert row["weights"] == "2 steps" and row["tokens"] == 192 and row["layers"] == 2
        assert 0 < row["relative_error"] <= row["tolerance"]
        assert 0 < row["p20_us"] <= row["p50_us"] and row["attend_us"] > 0
        parts = [row[name] or 0 for name in ("attend_us", "predict_us", "rest_us")]
        assert sum(parts) == pytest.approx(row["p50_us"])
    for row in (lists, blocks):
        assert row["whole_error"] <= row["whole_tolerance"] < row["velocity_error"]
        # Of three blocks of keys, two.
        assert row["density"] == pytest.approx(2 / 3 if row is blocks else 0.4, abs=0.1) and 0.4 < row["recall"] < 1
        assert row["flops_share"] < 1 and row["psnr"] > 0
    assert (dense["flops_share"], dense["velocity_error"], dense["psnr"]) == (1, 0, "")
    # The mean of a pass that makes lists and of one that has them.
    assert lists["p50_us"] == pytest.approx((lists["made_us"] + lists["kept_us"]) / 2)
    assert lists["lists_bytes"] > 0 and blocks["lists_bytes"] == "" and blocks["kept_us"] == ""


def test_compiled_layers_have_rows_of_their_own(trained, monkeypatch):
    built = []

    def compiled(network, **options):
        for block in network.blocks:
            block.compile(backend=lambda module, _: built.append(module) or module, **options)
        return network

    monkeypatch.setattr(wan.Network, "compile_layers", compiled)
    attention = {name: ATTENTION[name] for name in ("dense", "slices60")}
    rows = run(trained, attention, modes=("eager", "compile"))
    assert [(row["attention"], row["mode"], row["status"]) for row in rows] == [
        *((name, "eager", "ok") for name in attention), *((name, "compile", "ok") for name in attention)
    ]  # fmt: skip
    assert built and rows[3]["kept_us"] > 0 and rows[3]["attend_us"] == rows[1]["attend_us"]
    assert rows[3]["psnr"] == "" and rows[3]["velocity_error"] == pytest.approx(rows[1]["velocity_error"], rel=0.01)
    torch.compiler.reset()
    # Alone, they have times of parts, too; and what failed is told.
    monkeypatch.setattr(slices, "attend", lambda q, k, v, lists, **_: torch.zeros_like(q))
    attention = {"dense": attention["dense"], "once": msgspec.structs.replace(SLICES, every=1)}
    dense, failed = sorted(run(trained, attention, modes=("compile",)), key=lambda row: row["status"] == "failed")
    assert dense["status"] == "ok" and dense["attend_us"] > 0 and dense["mode"] == "compile"
    assert dense["sample_s"] > 0 and dense["rest_us"] == pytest.approx(dense["p50_us"] - dense["attend_us"])
    assert failed["status"] == "failed" and failed["p50_us"] == ""
    torch.compiler.reset()


def test_random_weights_are_said_to_be_random(monkeypatch):
    monkeypatch.setattr(video, "check_attention", lambda *_: None)
    stated = video.Settings({"dense": ATTENTION["dense"]}, ("eager",), 2, 0.01, None)
    monkeypatch.setattr(_video, "_inputs", lambda *_, **__: (torch.randn(1, 16, 1, 4, 4), torch.tensor([500.0]), None))
    (row,) = whole("video", _video.run(NAME, stated, QUICK))
    assert row["weights"] == "random" and row["psnr"] == ""


@pytest.mark.parametrize("by", [1e-3, torch.nan], ids=["off", "nan"])
def test_wrong_attention_is_never_timed(trained, monkeypatch, by):
    right = slices.attend
    monkeypatch.setattr(slices, "attend", lambda *arguments, **options: right(*arguments, **options) + by)
    monkeypatch.setattr(slices, "recall", lambda q, k, lists: torch.ones(1))
    # Kept lists are attended by elsewhere.
    once = msgspec.structs.replace(SLICES, every=1)
    dense, lists = run(trained, {"dense": ATTENTION["dense"], "slices60": once})
    assert dense["status"] == "ok" and lists["status"] == "failed" and lists["p50_us"] == ""
    # NaN meets the lists of the next layer first.
    assert ("an attention differs" if by == 1e-3 else "expected finite values") in lists["reason"]


def test_lists_that_lack_a_key_at_full_budget_are_refuted(trained, monkeypatch):
    """What the lists' own oracle follows, too, is seen where lists are to hold all keys."""
    right = slices.predict

    def less(q, k, **how):
        return right(q, k, **{name: 0.9 * x if name == "keep" else x for name, x in how.items()})

    monkeypatch.setattr(slices, "predict", less)
    _, row = run(trained, {"dense": ATTENTION["dense"], "slices60": msgspec.structs.replace(SLICES, every=1)})
    assert row["status"] == "failed" and "with lists of all keys the velocity is off" in row["reason"]


def test_a_case_reads_all_files_of_its_weights(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    weights = _weights.Weights(NAME, OPTIONS, str(tmp_path), None)
    assert _weights.sources(weights) == [str(index)]
    parts = [tmp_path / f"{part}.safetensors" for part in (1, 2)]
    for part in parts:
        part.touch()
    assert _weights.sources(weights) == [str(file) for file in (index, *parts)]


def test_weights_that_are_not_there_have_a_row_that_says_so(tmp_path):
    missing = _weights.Weights(NAME, OPTIONS, str(tmp_path / "none.safetensors"), None)
    assert _weights.sources(missing) == []
    (row,) = run(missing)
    assert (row["status"], row["reason"]) == ("skipped", f"no weights at {missing.path}")
    (row,) = recall_rows(missing)
    assert (row["status"], row["reason"], row["maps"]) == ("skipped", f"no weights at {missing.path}", "")


# Maps of networks


def recall_rows(weights, **changes):
    stated = {
        **{"layers": 2, "noise": (0.5,), "orders": ("hilbert",), "groups": ("128x1", "128x64"), "recalls": (0.9,)},
        **{"timed": 0.9, "predictors": {"pooled": {"pool": 64}}, "baselines": ("sdpa_dense",), "max_seconds": 0.01},
    }
    settings = recall.Settings(weights=weights, **stated | changes)
    return whole("recall", _recall.run("tiny-2x8x12", settings, QUICK))


def test_captured_heads_are_those_that_the_network_attends_by(trained):
    network, _ = _weights.load(trained, "cpu")
    clean = captured.photographs(GRID)
    found = captured.tokens(network, GRID, 0.25, (0, 1), clean=clean)
    assert found.heads == ((0, 0), (1, 0)) and found.q.shape == (1, 2, 192, 128)
    seen = {}
    drawn = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    point = 0.75 * clean + 0.25 * drawn
    with torch.no_grad(), captured.observed(network, point, lambda layer, q, k, v, out: seen.setdefault(layer, out)):
        network(point, 250.0)
    for layer in range(2):
        out = F.scaled_dot_product_attention(found.q[:, [layer]], found.k[:, [layer]], found.v[:, [layer]])
        assert torch.allclose(out, seen[layer], atol=1e-4)
    # The observers are gone.
    network(point, 250.0)
    assert all(not hasattr(layer, "seen") for layer in network.clip(GRID, "cpu").layers)
    with pytest.raises(ConfigError, match="noise: expected a share above 0"):
        captured.tokens(network, GRID, 0, (0,))


def test_layers_are_spread():
    assert captured.spread(12, 4) == (0, 4, 7, 11) and captured.spread(2, 4) == (0, 1) and captured.spread(5, 1) == (0,)


def test_recall_of_a_trained_network_says_where_its_maps_are_from(trained):
    rows = recall_rows(trained)
    assert {(row["maps"], row["network"], row["weights"], row["clip_noise"]) for row in rows} == {
        ("trained", NAME, "2 steps", 0.5)
    }
    assert {row["heads"] for row in rows} == {2} and {row["head_dim"] for row in rows} == {128}
    lists = [row for row in rows if row["chosen_by"]]
    assert [(row["group"], row["chosen_by"]) for row in lists] == [
        ("128x1", "oracle"), ("128x64", "oracle"), ("128x1", "pooled")
    ]  # fmt: skip
    # Of 192 tokens the last group has half as many as the first, and counts as much where lists are chosen.
    assert all(row["recall"] == pytest.approx(0.9, abs=0.02) and row["status"] == "ok" for row in lists)


@pytest.mark.parametrize("layout", ["official", "diffusers", "parts"])
def test_a_folder_of_official_weights_is_measured(tmp_path, layout):
    network = networks.create_video(NAME, **OPTIONS)
    state = {name: x.clone() for name, x in network.state_dict().items()}
    name = "diffusion_pytorch_model"
    if layout == "official":
        save_file(state, tmp_path / f"{name}.safetensors")
    else:
        (tmp_path / "transformer").mkdir()
        state = wan.diffusers_state(state)
        halves = [dict(list(state.items())[at::2]) for at in range(2)] if layout == "parts" else [state]
        files = [f"{name}-{at}.safetensors" for at in range(2)] if layout == "parts" else [f"{name}.safetensors"]
        for file, part in zip(files, halves, strict=True):
            save_file(part, tmp_path / "transformer" / file)
        if layout == "parts":
            named = {key: file for file, part in zip(files, halves, strict=True) for key in part}
            index = tmp_path / "transformer" / f"{name}.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": named}))
    weights = _weights.Weights(NAME, OPTIONS, str(tmp_path), None)
    loaded, facts = _weights.load(weights, "cpu")
    assert facts["maps"] == "official" and facts["weights"].startswith(name)
    assert torch.equal(loaded.head.head.weight, network.head.head.weight)
    # Its clips cannot be decoded here.
    (row,) = run(weights, {"dense": ATTENTION["dense"]})
    assert row["status"] == "ok" and row["weights"] == facts["weights"] and row["sample_s"] == ""
    rows = recall_rows(weights, recalls=(0.8,), timed=0.8, groups=("128x1",), predictors={}, layers=1)
    assert {row["maps"] for row in rows} == {"official"} and {row["heads"] for row in rows} == {1}


def test_a_folder_without_weights_has_none(tmp_path):
    assert weight_files.located(tmp_path) is None and weight_files.located(tmp_path / "x.safetensors") is None


# Pictures


def test_pictures_hold_each_source_by_itself_and_clips(trained, tmp_path):
    attention = {name: ATTENTION[name] for name in ("dense", "slices60")}
    stated = video.Settings(attention, ("eager",), 2, 0.01, trained)
    pairs = [f"{key}={json.dumps(value)}" for key, value in msgspec.to_builtins(stated).items()]
    video_pictures.run("tiny", tmp_path / "tiny.npz", "cpu", 0, pairs)
    arrays, header = video_pictures.read(tmp_path / "tiny.npz")
    assert list(header["maps"]) == ["planted", "trained"] and header["weights"] == "2 steps"
    for source, heads in header["maps"].items():
        shares, kept, group = (arrays[f"maps.{source}.{what}"] for what in ("shares", "kept", "group"))
        assert shares.shape == kept.shape == (len(heads), *GRID) and group.sum() == 128
        assert shares.sum((1, 2, 3)) == pytest.approx(1, abs=1e-3)
        assert np.all((shares * kept).sum((1, 2, 3)) > 0.6)


def test_pictures_without_weights_are_of_planted_maps_alone(tmp_path):
    missing = _weights.Weights(NAME, OPTIONS, str(tmp_path / "none"), None)
    stated = video.Settings({"dense": ATTENTION["dense"]}, ("eager",), 2, 0.01, missing)
    pairs = [f"{key}={json.dumps(value)}" for key, value in msgspec.to_builtins(stated).items()]
    video_pictures.run("tiny", tmp_path / "tiny.npz", "cpu", 0, pairs)
    _, header = video_pictures.read(tmp_path / "tiny.npz")
    assert list(header["maps"]) == ["planted"] and header["reason"] == f"no weights at {tmp_path / 'none'}"


# Configuration, tables and claims


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"networks": ["wan-huge"]}, "video.networks: unknown video network 'wan-huge'"),
        ({"modes": ["graph"]}, "video.modes: unknown mode 'graph'; known: eager, compile"),
        ({"attention": {}}, "video.attention: expected one by dense first, found none"),
        ({"sampler": 0}, "video.sampler: expected at least 1, found 0"),
        ({"max_seconds": 0}, "video.max_seconds: expected a number above 0"),
        (
            {"weights": {"tiny": {"network": "deit", "options": {}, "path": None, "recipe": None}}},
            "video.weights.tiny: unknown video network 'deit'",
        ),
    ],
)
def test_mistakes_in_the_configuration_are_named(changes, message):
    with pytest.raises(ConfigError) as caught:
        configured(video=changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "sparse"}, "attention.x: unknown attention 'sparse'"),
        ({"order": "morton"}, "attention.x: unknown order of tokens 'morton'"),
        ({"every": 0}, "attention.x.every: expected at least 1"),
        ({"by": "window", "every": 2}, "attention.x.every: expected 1 for attention window"),
        ({"settings": {"steps": {}}}, "attention.x.settings: expected every instead of steps"),
    ],
)
def test_mistakes_in_an_attention_are_named(change, message):
    wrong = {"dense": ATTENTION["dense"], "x": msgspec.structs.replace(SLICES, **change)}
    with pytest.raises(ConfigError) as caught:
        video.check_attention("attention", wrong)
    assert message in str(caught.value)


def test_recall_knows_the_weights_of_video():
    with pytest.raises(ConfigError, match=r"recall.networks: unknown weights of video.weights 'big'; known: tiny"):
        configured(recall={"networks": {"big": []}})
    with pytest.raises(ConfigError, match=r"recall.noise: expected shares above 0, at most 1, found 0"):
        configured(recall={"noise": [0.0]})


def test_trained_weights_are_made_by_a_rule():
    study = configured()
    assert experiments.sources("video", study, "tiny") == ["results/video/tiny.safetensors"]
    assert experiments.sources("recall", study, "tiny-3x11x18") == ["results/video/tiny.safetensors"]
    assert experiments.sources("recall", study, experiments.cases("recall", study)[0]) == []
    words = _weights.arguments(study.video.weights["tiny"], study)
    assert words[:2] == ["--network", "wan-tiny-480p-9f"]
    assert training.read_recipe(words[3].strip("'")).steps == 23


@pytest.fixture
def files(tmp_path):
    study = configured()
    synthetic.write_video(tmp_path, study)
    synthetic.write_recall(tmp_path, study)
    return {name: sorted((tmp_path / f"results/logs/{name}").glob("*.csv")) for name in ("video", "recall")}


def test_speed_ups_are_over_dense_attention_of_the_same_network(files):
    frame = video_table.table(files["video"])
    assert frame["speedup"].tolist() == pytest.approx([0.9**-place for place in range(len(frame))])
    assert frame["predict_share"].tolist() == pytest.approx([0.1] * len(frame))


def test_sources_of_maps_are_never_mixed(files):
    frame = recall_table.table(files["recall"])
    assert set(frame["maps"]) == {"planted", "trained"}
    names = frame.groupby("maps")["case"].unique()
    assert names["planted"].tolist() == ["2x64-9x20x26"]
    assert names["trained"].tolist() == ["trained 9 steps, tiny, 50% noise, 6x128-3x11x18"]
    assert frame.loc[frame["chosen_by"] != "", "over_slices"].notna().all()


@pytest.mark.parametrize(
    ("claim", "measured", "cases"),
    [
        ("video_passed:", 100, 1),
        ("video_over:slices80/tiny", 1 / 0.9, 1),
        ("video_over:", 1 / 0.9, 1),
        ("recall_ratio:128x64/0.95", 2, 2),
        ("recall_ratio:128x64/0.95/trained", 2, 2),
        ("recall_over:trained", 2, 1),
        ("recall_chosen:pooled32/0.95/trained", 1.5, 1),
    ],
)
def test_a_claim_is_judged_by_its_rows(claim, measured, cases, files, tmp_path):
    row = verdicts(tmp_path, files["recall" if claim.startswith("recall") else "video"], id=claim).iloc[0]
    assert (row.measured, row.cases) == (pytest.approx(measured, rel=1e-4), cases)
