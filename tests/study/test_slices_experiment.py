"""Attention by slice lists in T5: what lists keep, checked before it is timed, what tables and claims make of it."""

import types

import numpy as np
import pytest
import torch
from test_claims import verdicts
from test_figures import ROOT, configured

from helpers import synthetic
from helpers.checkout import merged
from helpers.rows import whole
from tilewright import reference, slices
from tilewright.core.errors import ConfigError
from tilewright_study import config, experiments
from tilewright_study.baselines.sparse import fa4
from tilewright_study.experiments import recall as recall_experiment
from tilewright_study.experiments import slices as slices_experiment
from tilewright_study.experiments.recall import run as _recall
from tilewright_study.experiments.recall import table_recall as recall_table
from tilewright_study.experiments.slices import run as _slices
from tilewright_study.experiments.slices import table_slices as slices_table
from tilewright_study.measure.effort import Run

CASE = "1x64-6x16x16"
QUICK = Run(rse=1.0, min_repetitions=3)
POOLED = {"pooled": {"by": "pooled", "pool": 64}}


@pytest.fixture(scope="module")
def maps():
    """One planted head; no test changes it."""
    return _slices.Maps(1, 64, (6, 16, 16), "hilbert")


def settings(**changes):
    stated = {
        **{"order": "hilbert", "sparsities": (0.6,), "groups": ("128x1", "128x64"), "predictors": POOLED},
        **{"baselines": ("sdpa_dense", "sdpa_cudnn"), "max_seconds": 0.01},
    }
    return slices_experiment.Settings(**stated | changes)


def run(**changes):
    return whole("slices", _slices.run(CASE, settings(**changes), QUICK))


def weights(maps):
    """float64 [N, N]: softmax weights of the head."""
    q, k, _ = (x[0, 0].double() for x in maps.qkv)
    return torch.softmax(q @ k.T / 8, -1)


# What lists keep


@pytest.mark.parametrize("shape", ["128x1", "64x1", "128x64"])
def test_lists_of_the_oracle_keep_the_share_of_attention_that_they_say(maps, shape):
    lists = maps.oracle_for(shape, 0.9)
    kept = (weights(maps) * torch.from_numpy(lists.found.graph(0, 0).to_dense())).sum(-1)
    assert lists.facts["recall"] == pytest.approx(float(kept.mean()), abs=1e-5)
    assert lists.facts["recall"] >= 0.9
    assert lists.facts["density"] == pytest.approx(lists.found.graph(0, 0).density, abs=1e-6)
    out = slices.attend(*maps.qkv, lists.found)
    dense = (weights(maps) @ maps.qkv[2][0, 0].double()).float()
    assert lists.facts["l1_error"] == pytest.approx(float((out - dense).abs().sum() / dense.abs().sum()), rel=1e-3)
    assert lists.facts["largest_error"] <= lists.facts["error_bound"]


def test_no_lists_of_as_many_keys_keep_more_than_those_of_the_oracle(maps):
    exact = maps.oracle("128x1", keep=0.3)
    for chosen in (maps.predicted("pooled", POOLED["pooled"], keep=0.3, budget=0.3), maps.oracle("128x64", keep=0.3)):
        assert chosen.facts["density"] == pytest.approx(exact.facts["density"], abs=0.03)
        assert chosen.facts["recall"] < exact.facts["recall"]


def test_lists_of_a_predictor_keep_the_share_of_attention_that_was_asked_for(maps):
    lists = maps.predicted_for("pooled", POOLED["pooled"], 0.9)
    assert 0.9 <= lists.facts["recall"] <= 0.9 + 3 * _slices.PRECISION
    assert lists.facts["mass"] > 0.9


def test_uneven_lists_keep_as_many_keys_as_equal_ones(maps):
    equal, uneven = maps.oracle("128x1", keep=0.3), maps.uneven("128x1", 0.3)
    assert equal.found.counts.unique().numel() == 1 < uneven.found.counts.unique().numel()
    assert uneven.facts["density"] == pytest.approx(0.3, abs=0.01)
    assert uneven.facts["recall"] > 0.99 * equal.facts["recall"]


def test_an_order_moves_the_tokens_and_nothing_else(maps):
    other = _slices.Maps(1, 64, (6, 16, 16), "raster")
    assert torch.equal(other.made.q, maps.made.q)
    assert not torch.equal(other.qkv[0], maps.qkv[0])
    assert other.dense.sum() == pytest.approx(float(maps.dense.sum()), rel=1e-3, abs=1e-2)


# Text


@pytest.fixture(scope="module")
def joint():
    """As `maps`, with text before and behind the video; no test changes it."""
    return _slices.Maps(1, 64, (6, 16, 16), "hilbert", text=(21, 30))


TEXT = [*range(21), *range(21 + 1536, 1587)]


def test_an_order_leaves_text_where_it_is(joint):
    raster = _slices.Maps(1, 64, (6, 16, 16), "raster", text=(21, 30))
    for one, other in zip(joint.qkv, raster.qkv, strict=True):
        assert torch.equal(one[:, :, TEXT], other[:, :, TEXT]) and not torch.equal(one, other)
        assert torch.equal(one[0, 0].sort(0).values, other[0, 0].sort(0).values)


@pytest.mark.parametrize("how", [{"keep": 0.4}, {"mass": 0.5}], ids=str)
@pytest.mark.parametrize("shape", ["128x1", "64x1", "128x16"])
def test_lists_of_the_oracle_hold_the_text_and_the_largest_shares(joint, shape, how):
    lists, shares = joint.oracle(shape, **how), weights(joint)
    pattern = lists.found.graph(0, 0).to_dense()
    assert pattern[TEXT].all() and pattern[:, TEXT].all() and not pattern.all()
    kept = (shares * torch.from_numpy(pattern)).sum(-1)
    assert lists.facts["recall"] == pytest.approx(float(kept.mean()), abs=1e-5)
    assert lists.facts["density"] == pytest.approx(pattern.mean(), abs=1e-6)
    rows, width = _slices.group(shape)
    group = shares[21 : 21 + rows].mean(0)
    if width == 1:
        listed = pattern[21].nonzero()[0]
        chosen, others = np.setdiff1d(listed, TEXT), np.setdiff1d(np.arange(1587), listed)
        assert group[chosen].min() >= group[others].max() - 1e-6
    if "mass" in how:
        assert group[pattern[21]].sum() >= 0.5
    else:
        assert pattern[21].sum() == pytest.approx(0.4 * 1587, abs=width)


def test_a_case_with_text_has_every_row():
    case, changes = "1x64-26-6x16x16", {"groups": ("128x1", "128x128"), "baselines": ("sdpa_dense", "flex")}
    rows = whole("slices", _slices.run(case, settings(**changes), QUICK))
    assert [row["status"] for row in rows] == ["ok"] * 7 + ["skipped"]
    assert "found text" in rows[-1]["reason"]
    for row in rows[:7]:
        assert (row["grid"], row["tokens"], row["heads"]) == ("26-6x16x16", 1562, 1) and row["p50_us"] > 0
    assert list(_slices.first_calls(case, settings(**changes), QUICK)) == []
    made = recall_experiment.Settings(
        weights=None,
        layers=1,
        noise=(),
        orders=("hilbert",),
        groups=("128x1",),
        recalls=(0.9,),
        timed=0.9,
        predictors=POOLED,
        baselines=(),
        max_seconds=0.01,
    )
    for row in whole("recall", _recall.run(case, made, QUICK)):
        assert row["status"] == "ok" and row["recall"] >= 0.9 and row["grid"] == "26-6x16x16"


def test_cases_of_networks_have_their_sizes():
    tokens = {"cogvideox-2b": 17_776, "cogvideox-5b": 17_776, "hunyuan": 119_056}
    assert set(slices_experiment.MODELS) == set(tokens)
    for case, count in tokens.items():
        _, _, grid = slices_experiment.sizes(case)
        assert np.prod(grid) + sum(slices_experiment.text(case)) == count
    assert slices_experiment.sizes("cogvideox-2b") == (30, 64, (13, 30, 45))
    assert (slices_experiment.text("cogvideox-5b"), slices_experiment.text("hunyuan")) == ((226, 0), (0, 256))
    assert slices_experiment.text("2x64-9x20x26") == (0, 0)
    assert slices_experiment.size("hunyuan", None) == 4 * 24 * 119_056 * 931


# Rows


def test_every_contender_has_a_row_that_was_checked():
    rows = run()
    told = [(row["provider"], row["call"], row["group"], row["chosen_by"], row["keep"] != "") for row in rows]
    assert told == [
        ("sdpa_dense", "attend", "", "", False),
        ("sdpa_cudnn", "attend", "", "", False),
        ("tilewright", "attend", "128x1", "oracle", True),
        ("tilewright", "attend", "128x64", "oracle", True),
        ("tilewright", "attend", "128x1", "oracle", False),
        ("tilewright", "attend", "128x1", "pooled", True),
        ("tilewright", "predict", "128x1", "pooled", True),
        ("tilewright", "predict_attend", "128x1", "pooled", True),
    ]
    assert (rows[1]["status"], rows[1]["reason"]) == ("skipped", "runs on an NVIDIA GPU only, found cpu")
    for row in rows[:1] + rows[2:]:
        assert row["status"] == "ok" and 0 < row["p20_us"] <= row["p50_us"] and row["host_us"] == ""
        assert row["maps"] == "planted" and row["sparsity"] == 0.6
        if row["call"] != "predict":
            assert 0 < row["relative_error"] <= row["tolerance"] and row["checked_rows"] > 100
        if row["provider"] == "tilewright":
            assert row["density"] == pytest.approx(0.4, abs=0.03)


def test_peers_attend_by_the_lists_of_their_blocks():
    """A row says which blocks, also where the peer is not there."""
    rows = run(groups=("128x1", "128x64", "128x128"), predictors={}, baselines=("fa4", "flashinfer"))
    told = [(row["provider"], row["group"], row["status"]) for row in rows if row["provider"] != "tilewright"]
    assert told == [(name, group, "skipped") for name in ("fa4", "flashinfer") for group in ("128x64", "128x128")]


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_a_peer_gets_the_blocks_of_its_lists(monkeypatch, status):
    def blocks(flags, shape, *, block, head_dim, dtype, device):
        assert (block, head_dim, dtype, device) == ((128, 64), 64, torch.float32, "cpu")
        pairs = flags.repeat_interleave(128, 2).repeat_interleave(64, 3)[..., : shape[0], : shape[1]]
        if status == "failed":
            pairs = pairs.roll(1, 3)
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs)

    monkeypatch.setattr(fa4, "blocks", blocks)
    row = run(groups=("128x1", "128x64"), predictors={}, baselines=("fa4",))[-1]
    assert (row["provider"], row["group"], row["status"]) == ("fa4", "128x64", status)
    assert (row["p50_us"] == "") == (status == "failed")


@pytest.mark.parametrize("by", [1e-3, torch.nan], ids=["off", "nan"])
def test_wrong_attention_is_never_timed(monkeypatch, by):
    right = slices.attend

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        return (out[0] + by, out[1]) if options.get("lse") else out + by

    monkeypatch.setattr(slices, "attend", wrong)
    for row in run():
        expected = "failed" if row["provider"] == "tilewright" and row["call"] != "predict" else row["status"]
        assert row["status"] == expected
        assert (row["p50_us"] == "") == (row["status"] != "ok")


def test_a_key_that_is_missing_from_the_lists_is_seen(maps):
    """The oracle follows the lists, hence recall must say what they lack."""
    lists = maps.oracle("128x1", keep=0.4)
    less = maps.oracle("128x1", keep=0.4 - 64 / maps.tokens)
    assert less.facts["recall"] < lists.facts["recall"] and less.facts["l1_error"] > lists.facts["l1_error"]
    contender = _slices.Contender(lists.facts, lambda: slices.attend(*maps.qkv, less.found), lists, 1)
    (row,) = _slices.rows_of(maps, [({}, lambda: [contender])], QUICK.effort(0.01))
    assert row["status"] == "failed" and "relative error" in row["reason"]


def test_the_tolerance_grows_with_the_scores(maps):
    assert maps.tolerance > reference.TOLERANCE[torch.float32]
    assert maps.tolerance < 10 * reference.TOLERANCE[torch.float32]


def test_recall_has_a_row_for_each_order_target_and_chooser():
    of = {"weights": None, "layers": 1, "noise": (), "orders": ("hilbert", "raster"), "groups": ("128x1", "128x64")}
    how = {"recalls": (0.8, 0.9), "timed": 0.9, "predictors": POOLED, "baselines": ("sdpa_dense",), "max_seconds": 0.01}
    stated = recall_experiment.Settings(**of, **how)
    rows = whole("recall", _recall.run(CASE, stated, QUICK))
    lists = [row for row in rows if row["chosen_by"]]
    assert [(row["token_order"], row["target"], row["group"], row["chosen_by"]) for row in lists] == [
        (order, target, *by)
        for order in stated.orders
        for target in stated.recalls
        for by in [("128x1", "oracle"), ("128x64", "oracle")] + [("128x1", "pooled")] * (order == "hilbert")
    ]
    assert all(row["target"] <= row["recall"] < row["target"] + 0.02 for row in lists)
    timed = [row for row in rows if row["p50_us"] != ""]
    assert {(row["token_order"], row["target"]) for row in timed} == {("hilbert", 0.9)}
    assert [row["provider"] for row in timed] == ["sdpa_dense", *["tilewright"] * 3]


# Configuration


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (
            "slices",
            {"order": "morton"},
            "slices.order: unknown order of tokens 'morton'; known: raster, voxel, hilbert",
        ),
        ("slices", {"sparsities": [1.0]}, "slices.sparsities: expected shares between 0 and 1, found 1.0"),
        ("slices", {"groups": ["128x64"]}, "slices.groups: expected 128x1 among them, found 128x64"),
        ("slices", {"groups": ["128x1"]}, "slices.groups: the baseline flex needs 128x128"),
        (
            "slices",
            {"groups": ["128x1"], "baselines": ["fa4"]},
            "the baseline fa4 needs 128x128 or 128x64 or 64x64",
        ),
        ("slices", {"groups": ["128x1", "wide"]}, "slices.groups: "),
        ("slices", {"predictors": {"x": {"by": "guess"}}}, "slices.predictors.x: unknown predictor 'guess'"),
        ("slices", {"predictors": {"x": {"pools": 3}}}, "slices.predictors.x: predictor pooled: "),
        ("slices", {"baselines": ["fa5"]}, "slices.baselines: unknown baseline 'fa5'"),
        ("slices", {"grids": [[0, 2, 3]]}, "slices.grids: expected at least 1, found 0"),
        ("slices", {"joint": ["sora"]}, "slices.joint: case 'sora': expected <heads>x<head_dim>-"),
        ("recall", {"joint": ["hunyuan", "hunyuan"]}, "recall.joint: 'hunyuan' appears twice"),
        ("slices", {"max_seconds": 0}, "slices.max_seconds: expected a number above 0"),
        ("recall", {"orders": ["hilbert", "hilbert"]}, "recall.orders: 'hilbert' appears twice"),
        ("recall", {"recalls": [0.9, 0.0]}, "recall.recalls: expected shares between 0 and 1, found 0.0"),
        ("recall", {"timed": 0.5}, "recall.timed: expected one of 0.8, 0.9, 0.95, 0.99, found 0.5"),
    ],
)
def test_mistakes_in_the_configuration_are_named(section, changes, message):
    with pytest.raises(ConfigError) as caught:
        configured(**{section: changes})
    assert message in str(caught.value)


@pytest.mark.parametrize("case", ["2x64", "2x64-9x20", "2xa-9x20x26", "0x64-9x20x26", "2x64-0-9x20x26", "cogvideox"])
def test_a_case_is_a_shape_and_a_grid(case):
    with pytest.raises(ConfigError, match="such as 2x64-9x20x26"):
        slices_experiment.sizes(case)


def test_the_lists_of_names_are_those_of_the_modules():
    """They stand apart so that a configuration is read without torch."""
    from tilewright.slices import orders

    assert slices_experiment.ORDERS == orders.NAMES


def test_the_overlay_for_a_gpu_is_a_study():
    mapping = merged(ROOT / "config/h200.yaml")
    study = config.load({**mapping, "experiments": ["slices"]})
    assert experiments.cases("slices", study)[0] == "12x128-21x30x52"


def test_the_overlay_for_trained_maps_has_one_case_of_its_own_weights():
    mapping = merged(ROOT / "config/h200.yaml")
    study = config.load({**mapping, "experiments": ["recall"]})
    assert list(experiments.cases("recall", study)) == ["brief-21x30x52"]
    assert "results/video/brief.safetensors" in " ".join(experiments.arguments("recall", study, "brief-21x30x52"))


def test_shapes_of_as_many_queries_share_what_groups_attend_to(monkeypatch):
    from tilewright_study.experiments.slices import run as _slices
    from tilewright_study.measure import slice_shares

    asked, group_shares = [], slice_shares.group_shares

    def counted(q, k, groups, *, rows):
        asked.append(rows)
        return group_shares(q, k, groups, rows=rows)

    monkeypatch.setattr(slice_shares, "group_shares", counted)
    made = types.SimpleNamespace(**dict(zip("qkv", torch.randn(3, 1, 2, 160, 64), strict=True)))
    maps = _slices.Maps(2, 64, (2, 8, 10), "hilbert", made=made)
    for shape in ("32x1", "32x16", "16x1", "32x1"):
        maps.ranked(shape)
    assert asked == [32, 32, 16, 16]
    right = torch.stack([group_shares(*(x[0, h] for x in maps.exact[:2]), torch.arange(5), rows=32) for h in range(2)])
    torch.testing.assert_close(maps.ranked("32x16").cumulative[..., -1].float(), right.sum(-1))


# Tables and claims


@pytest.fixture
def files(tmp_path):
    study = configured(slices={"predictors": {"pooled32": {}}, "baselines": ["sdpa_dense", "flex"]})
    synthetic.write_slices(tmp_path, study)
    synthetic.write_recall(tmp_path, study)
    return {name: sorted((tmp_path / f"results/logs/{name}").glob("*.csv")) for name in ("slices", "recall")}


def test_speed_ups_are_over_the_dense_attention_of_the_same_turns(files):
    frame = slices_table.table(files["slices"])
    exact = slices_table.attending(frame)
    assert set(exact["lengths"]) == {"equal", "uneven"}
    equal = exact[exact["lengths"] == "equal"]
    assert (equal["speedup"] * 1.2 * (1 - equal["sparsity"])).tolist() == pytest.approx([1] * len(equal))
    assert frame.loc[frame["provider"] == "sdpa_dense", "speedup"].tolist() == [1] * 3
    assert frame.loc[frame["provider"] == "flex", "speedup"].isna().all()


def test_keys_are_counted_over_those_of_slices_in_the_same_order(files):
    frame = recall_table.table(files["recall"])
    lists = frame[frame["chosen_by"] != ""]
    ratio = lists.groupby("group")["over_slices"].agg(["min", "max"])
    assert ratio.loc["128x64"].tolist() == pytest.approx([2, 2])
    assert ratio.loc["128x1"].tolist() == pytest.approx([1, 1.5])
    assert frame.loc[frame["provider"] == "sdpa_dense", "over_slices"].isna().all()


@pytest.mark.parametrize(
    ("claim", "measured"),
    [
        ("slices_over:dense/0.8/2x64-9x20x26", 1 / (1.2 * 0.2)),
        ("slices_over:", 1 / (1.2 * 0.3)),
        ("slices_made:pooled32/0.8/2x64-9x20x26", 1 / (1.2 * 0.2 + 0.1)),
        ("predict_share:pooled32/2x64-9x20x26", 10),
        ("slices_uneven:", 1.2 / 1.25),
        ("slices_passed:", 100),
        ("recall_passed:", 100),
        ("recall_ratio:128x64/0.95", 2),
        ("recall_over:", 2),
    ],
)
def test_a_claim_is_judged_by_its_rows(claim, measured, files, tmp_path):
    row = verdicts(tmp_path, files["recall" if claim.startswith("recall") else "slices"], id=claim).iloc[0]
    assert row.measured == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize("claim", ["slices_over:dense/0.8/12x128-21x30x52", "predict_share:pooled128/2x64-9x20x26"])
def test_a_claim_about_a_case_that_was_not_run_is_left_out(claim, files, tmp_path):
    assert verdicts(tmp_path, files["slices"], id=claim).empty
