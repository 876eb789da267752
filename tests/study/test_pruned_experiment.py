"""Packed attention and pruned networks in T5: compared before they are timed, and who kept which tokens."""

import dataclasses
import json
from functools import partial

import pandas as pd
import pytest
import torch

from helpers.rows import whole
from tilewright import networks
from tilewright.core import images
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.masks import deit
from tilewright.networks import batching, token_layouts
from tilewright.networks import deit as deit_network
from tilewright.networks.batching import ragged as packed
from tilewright.packed.pruners import Choice
from tilewright_study import experiments
from tilewright_study.baselines import packed as packed_baselines
from tilewright_study.experiments.pruned import run as pruned
from tilewright_study.experiments.ragged import run as ragged
from tilewright_study.measure.effort import Effort
from tilewright_study.stages import experiment
from tilewright_study.tables import _read

QUICK = Effort(rse=1.0, min_repetitions=3, max_seconds=0.01)
ARGUMENTS = {"rse": 1.0, "min_repetitions": 3, "seed": 0, "device": "cpu", "dtype": "float32"}
NAME = "deit-tiny-64-threshold_l2"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """DeiT-T as published, but for its width."""
    monkeypatch.setitem(deit.VARIANTS, "tiny", (32, 2))


def attended(attention, lengths=((3, 9),)):
    return whole("ragged", ragged.run_ragged(2, 16, lengths, attention, QUICK))


def run(settings=({},), batchings=("padded", "ragged"), modes=None, name=NAME, **options):
    return whole("pruned", pruned.run_pruned(name, settings, batchings, modes or {"eager": [2]}, QUICK, **options))


# Packed attention


def test_every_provider_and_call_has_a_row_that_was_checked():
    rows = attended({"tilewright": [1, 3], "sdpa_mask": [3], "flash_varlen": [3]})
    told = [(row["images"], row["provider"], row["call"]) for row in rows]
    ours = [("tilewright", call) for call in ("attend", "attend_into", *ragged.MOVES)]
    peers = [("sdpa_mask", "attend"), ("flash_varlen", "attend")]
    assert told == [(1, *row) for row in ours] + [(3, *row) for row in ours + peers]
    assert (rows[-1]["status"], rows[-1]["reason"]) == ("skipped", "runs on an NVIDIA GPU only, found cpu")
    for row in rows[:-1]:
        assert row["status"] == "ok" and 0 < row["p20_us"] <= row["p50_us"] and row["host_us"] == ""
        assert row["max_abs_error"] <= row["tolerance"] and 3 <= row["longest"] <= 9


def test_useful_work_is_that_of_the_kept_tokens():
    (row, *_) = attended({"tilewright": [2]}, lengths=[(5, 5)])
    assert row["tokens"] == 10
    assert row["useful_gflops"] == pytest.approx(4 * 2 * 16 * 2 * 5 * 5 / row["p50_us"] / 1e3)


@pytest.mark.parametrize("by", [1e-3, torch.nan], ids=["off", "nan"])
def test_wrong_attention_is_never_timed(monkeypatch, by):
    right = packed_baselines.prepare

    def wrong(*arguments):
        ready = right(*arguments)
        return packed_baselines.Ready(lambda *qkv: ready.call(*qkv) + by, ready.put, ready.get)

    monkeypatch.setattr(packed_baselines, "prepare", wrong)
    (row,) = attended({"sdpa_mask": [2]})
    assert row["status"] == "failed" and "tolerance 1.5e-05" in row["reason"] and row["p50_us"] == ""


def test_what_torch_cannot_do_is_a_reason(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(packed_baselines, "prepare", refuse)
    (row,) = attended({"nested": [2]})
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: no kernel")


@pytest.mark.parametrize(
    ("attention", "dtype", "message"),
    [
        ({"vaarlen": [1]}, "float32", "unknown attention 'vaarlen'; known: tilewright, sdpa_mask"),
        ({"nested": [1]}, "float64", "unknown dtype 'float64'"),
    ],
)
def test_unknown_names_of_packed_attention(attention, dtype, message):
    with pytest.raises(UnknownNameError, match=message):
        list(ragged.run_ragged(2, 16, [(3, 9)], attention, QUICK, dtype=dtype))


# Pruned networks


def test_batchings_are_compared_with_padded_and_timed():
    rows = run([{"keep_ratio": 0.5}, {"keep_range": [0.3, 0.7]}], batching.NAMES, {"eager": [1, 4], "graph": [1]})
    assert len(rows) == 36
    assert {row["setting"] for row in rows} == {"keep_ratio=0.5", "keep_range=[0.3, 0.7]"}
    for row in rows:
        if row["mode"] == "graph" or row["batching"] == "varlen":
            assert (row["status"], row["reason"]) == ("skipped", "runs on an NVIDIA GPU only, found cpu")
        elif row["batching"] == "gathered" and row["spread"]:
            assert row["status"] == "skipped" and "equal numbers of tokens" in row["reason"]
        else:
            assert row["status"] == "ok" and row["same_tokens"] == row["inputs"] == pruned.JUDGED
            assert row["same_top1"] == row["same_top1_all"] == 1
            assert row["max_abs_error"] == row["max_abs_error_all"] <= 1e-4
            assert row["relative_error"] <= 1e-4 and row["attention_error"] <= 2e-5
            assert row["images_per_s"] == pytest.approx(row["batch"] * 1e6 / row["p50_us"])
            assert (row["pack_share"] != "") == (row["batching"] == "ragged")
    spread = {(row["setting"], row["batch"]): row["spread"] for row in rows}
    assert spread["keep_range=[0.3, 0.7]", 4] > 1 and spread["keep_range=[0.3, 0.7]", 1] == 0
    assert spread["keep_ratio=0.5", 4] <= 1


def test_only_images_that_keep_the_same_tokens_are_compared(monkeypatch):
    """The packed network keeps another token of the first image of each batch; of all images it is told."""
    narrow = packed.narrow

    def other(x, layout, choice, *rest):
        keep = choice.keep
        # In place, as the network tells of it.
        gone, come = keep[0, 1:].nonzero()[0, 0] + 1, (~keep[0]).nonzero()[0, 0]
        keep[0, gone], keep[0, come] = False, True
        return narrow(x, layout, choice, *rest)

    # As if rounding had chosen: what is packed is what the choice now is.
    monkeypatch.setattr(pruned._Watched, "narrow", lambda self, *arguments: self._narrow(*arguments))
    monkeypatch.setattr(packed, "narrow", other)
    padded, ours = run([{"keep_ratio": 0.5}])
    assert (padded["same_tokens"], padded["inputs"]) == (pruned.JUDGED, pruned.JUDGED)
    assert ours["status"] == "ok" and 2 * ours["same_tokens"] == ours["inputs"] == pruned.JUDGED
    assert ours["max_abs_error"] <= 1e-4 < ours["max_abs_error_all"] and 0 < ours["same_top1_all"] <= 1
    _, alone = run([{"keep_ratio": 0.5}], modes={"eager": [1]})
    assert (
        alone["status"] == "failed" and alone["reason"] == f"none of {pruned.JUDGED} images kept the tokens of padded"
    )
    assert alone["same_top1_all"] != "" and alone["max_abs_error"] == ""


def test_top1_of_all_images_is_a_column(monkeypatch):
    """Of one image the packed network says something else, and keeps another token."""
    seen, calls = pruned._seen, []

    def other(call, inputs, batch):
        made = seen(call, inputs, batch)
        calls.append(call)
        # The oracle is seen first, then padded, then ours.
        if len(calls) == 3:
            made.logits[0] = made.logits[0].flip(0)
            made.states[0][0] = made.states[0][0].flip(0)
        return made

    monkeypatch.setattr(pruned, "_seen", other)
    _, ours = run([{"keep_ratio": 0.5}])
    assert (ours["status"], ours["same_tokens"], ours["same_top1"]) == ("ok", pruned.JUDGED - 1, 1)
    assert ours["same_top1_all"] == 1 - 1 / pruned.JUDGED and ours["max_abs_error_all"] > 0.1 > ours["max_abs_error"]


class _MeanOfValues(token_layouts.Packed):
    def attend(self, q, k, v):
        padded = self.padded(v) * self.valid[..., None, None]
        lengths = self.packing.starts.diff()
        return (padded.sum(1) / lengths[:, None, None]).to(v.dtype).repeat_interleave(lengths, 0)


class _OfTheNeighbour(token_layouts.Packed):
    def attend(self, q, k, v):
        return super().attend(q, k.roll(1, 0), v.roll(1, 0))


class _OneLess(token_layouts.Packed):
    def attend(self, q, k, v):
        """Another key stands for that of the last token."""
        last = self.packing.starts[1] - 1
        k, v = (torch.cat((x[:last], x[last - 1 : last], x[last + 1 :])) for x in (k, v))
        return super().attend(q, k, v)


def _without_one(narrow, x, layout, choice, *rest):
    """The packing lacks a token of one image that the pruner kept."""
    keep = choice.keep.clone()
    keep[0, keep[0].nonzero()[-1]] = False
    x, narrower = narrow(x, layout, dataclasses.replace(choice, keep=keep, least=choice.least - 1), *rest)
    return x, narrower


FAULTS = {
    "mean": lambda narrow, *arguments: narrow(*arguments, _MeanOfValues),
    "neighbour": lambda narrow, *arguments: narrow(*arguments, _OfTheNeighbour),
    "key": lambda narrow, *arguments: narrow(*arguments, _OneLess),
    "token": _without_one,
    "reversed": lambda narrow, x, *rest: (lambda out, layout: (out.flip(0), layout))(*narrow(x, *rest)),
}


# The fault that changes least in every type, each other one in one of them.
SEEN_IN = {"mean": ["float32"], "neighbour": ["bfloat16"], "key": [*pruned.TOLERANCE], "token": ["float16"]}
SEEN_IN["reversed"] = ["bfloat16"]
# The least one, and a token that is lost, show that attention is judged; others are larger faults of it.
OF_EACH = [("mean", "float32"), ("key", "float32"), ("key", "float16"), ("token", "float16")]


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param(fault, dtype, marks=[] if (fault, dtype) in OF_EACH else pytest.mark.slow)
        for fault in FAULTS
        for dtype in SEEN_IN[fault]
    ],
)
def test_wrong_attention_and_lost_tokens_are_never_timed(monkeypatch, fault, dtype):
    # As wide as published: narrow ones attend nearly evenly.
    monkeypatch.setitem(deit.VARIANTS, "tiny", (192, 3))
    monkeypatch.setattr(pruned, "JUDGED", 4)
    monkeypatch.setattr(pruned, "FITTED", 16)
    monkeypatch.setattr(packed, "narrow", partial(FAULTS[fault], packed.narrow))
    padded, ours = run([{"keep_ratio": 0.7}], dtype=dtype, name="deit-tiny-160-threshold_l2")
    assert padded["status"] == "ok" and padded["p50_us"] > 0
    assert ours["status"] == "failed" and ours["p50_us"] == ours["pack_us"] == ""
    assert "attention is off by " in ours["reason"]


class _In16Bits(deit_network.Network):
    """Computes in 16 bits, as on a GPU; elsewhere a network only stores them."""

    forward = deit_network.Network.forward.__wrapped__


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_16_bits_round_passes(monkeypatch, dtype):
    monkeypatch.setitem(deit.VARIANTS, "tiny", (192, 3))
    monkeypatch.setattr(pruned, "FITTED", 16)
    monkeypatch.setattr(deit_network, "Network", _In16Bits)
    attention = ["padded", "padded_unfused", "padded_kept", "ragged"]
    rows = run([{"keep_ratio": 0.5}], attention, {"eager": [4]}, "deit-tiny-96-threshold_l2", dtype=dtype)
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert 2e-5 < row["attention_error"] < pruned.ATTENTION_TOLERANCE[dtype] / 2
        assert row["relative_error"] < row["tolerance"] / 2
    assert rows[1]["relative_error"] > 1e-4


def test_a_fused_token_differs_from_one_that_was_kept():
    keep, fused = torch.tensor([[True, True, True, False]] * 2), torch.tensor([[False, True, False, False]] * 2)
    fused[1] = fused[1].roll(1)
    seen = [
        pruned.Seen(torch.zeros(2, 3), (pruned._state(Choice(keep, 3, 3, each)),), ())
        for each in (fused, fused[:1].expand_as(fused))
    ]
    assert seen[0].same_tokens(seen[1]).tolist() == [True, False]
    assert seen[0].counts[0].tolist() == [3, 3]


def test_a_fitted_head_classifies_the_photographs():
    network = networks.create("deit", variant="tiny", image_size=64)
    with torch.inference_mode():
        pruned.fit_head(network, pruned.crops(pruned.FITTED, 64, seed=1))
        kinds = len(images.PHOTOGRAPHS)
        logits = network(pruned.crops(8 * kinds, 64))
    assert (logits.argmax(1) == torch.arange(8 * kinds) % kinds).float().mean() > 0.8
    assert not logits[:, kinds:].any()


def test_other_logits_are_never_timed(monkeypatch):
    narrow = packed.narrow

    def off(x, *rest):
        return narrow(x * 2, *rest)

    monkeypatch.setattr(packed, "narrow", off)
    _, ours = run([{"keep_ratio": 0.5}])
    # What goes on is not what the pruner chose.
    assert ours["status"] == "failed" and "attention is off by inf" in ours["reason"]
    assert ours["p50_us"] == ours["pack_us"] == ""


@pytest.mark.parametrize("by", [1e-3, torch.nan], ids=["off", "nan"])
def test_a_head_that_says_something_else_is_never_timed(monkeypatch, by):
    seen, calls = pruned._seen, []

    def off(call, inputs, batch):
        made = seen(call, inputs, batch)
        calls.append(call)
        return dataclasses.replace(made, logits=made.logits + by * torch.eye(*made.logits.shape) * (len(calls) == 3))

    monkeypatch.setattr(pruned, "_seen", off)
    _, ours = run([{"keep_ratio": 0.5}])
    assert ours["status"] == "failed" and "from those of padded, tolerance 0.0001" in ours["reason"]
    assert ours["p50_us"] == ""


def test_crops_are_all_different():
    crops = pruned.crops(20, 32)
    assert crops.shape == (20, 3, 32, 32) and len({crop.numpy().tobytes() for crop in crops}) == 20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "vil-tiny-64"}, ConfigError, "network: expected one of the family deit, found vil-tiny-64"),
        ({"batchings": ["paded"]}, UnknownNameError, "unknown batching 'paded'; known: padded"),
        ({"modes": {"egaer": [1]}}, UnknownNameError, "unknown mode 'egaer'; known: eager, graph, compile"),
        ({"settings": [{"keep_ratio": 2}]}, ConfigError, "keep_ratio"),
        ({"dtype": "float64"}, UnknownNameError, "unknown dtype 'float64'"),
    ],
)
def test_wrong_requests(options, error, message):
    with pytest.raises(error, match=message):
        run(**options)


# Files


def command(name, case, path, *stated):
    experiment.run(name, case, path, **ARGUMENTS, stated=[*stated, "max_seconds=0.01"])


def test_files_of_rows_are_written(tmp_path, capsys):
    kernel, network = tmp_path / "r.csv", tmp_path / "p.csv"
    command("ragged", "2x16", kernel, "lengths=[[3, 9]]", "attention={tilewright: [1, 2]}")
    command("pruned", NAME, network, "settings=[{keep_ratio: 0.5}]", "batching=[padded]", "modes={eager: [1]}")
    for path, kind in ((kernel, "ragged"), (network, "pruned")):
        assert tuple(pd.read_csv(path).columns) == experiments.member(kind).Row.columns()
        (frame,) = _read.frames([path], kind)
        assert set(frame["status"]) == {"ok"}
    assert "tilewright pack, 2 images of 3-9: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("[[9, 3]]", r"lengths: expected the least first, found \[9, 3\]"),
        ("[[0, 4]]", "lengths: expected at least 1, found 0"),
        ("[[4]]", "Expected `array` of length 2"),
        ("[[a, b]]", "Expected `int`, got `str`"),
    ],
)
def test_lengths_are_a_range(lengths, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        command("ragged", "2x16", tmp_path / "x.csv", f"lengths={lengths}", "attention={tilewright: [1]}")
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize("case", ["2", "2x", "x2", "0x8", "axb"])
def test_a_shape_is_heads_and_a_dimension(case, tmp_path):
    with pytest.raises(ConfigError, match=f"case '{case}': expected <heads>x<head_dim>, such as 3x64"):
        command("ragged", case, tmp_path / "x.csv", "lengths=[[3, 9]]", "attention={tilewright: [1]}")


def test_settings_are_maps(tmp_path):
    with pytest.raises(ConfigError, match="experiment pruned: Expected `object`, got `int`"):
        command("pruned", NAME, tmp_path / "x.csv", "settings=[3]", "batching=[padded]", "modes={eager: [1]}")


def test_the_unpruned_network_is_one_of_the_contenders():
    rows = run([{"keep_ratio": 0.5}], ("unpruned", "padded", "ragged"), modes={"eager": [1, 2]})
    assert [(row["batch"], row["batching"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in ("unpruned", "padded", "ragged")
    ]
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        # It drops nothing, so that its logits are others than those of the pruned.
        if row["batching"] == "unpruned":
            assert row["same_tokens"] == row["inputs"] and row["max_abs_error_all"] == 0


def test_an_unpruned_network_has_the_weights_of_the_pruned():
    made = networks.create("deit", variant="tiny", image_size=64, pruner="evit", keep_ratio=0.5)
    plain = pruned._unpruned(made)
    images = pruned.crops(2, 64)
    wanted = networks.create("deit", variant="tiny", image_size=64)
    with torch.inference_mode():
        torch.testing.assert_close(plain(images), wanted(images))
        assert not torch.allclose(plain(images), made(images))


def test_an_unpruned_network_with_other_logits_is_never_timed(monkeypatch):
    unpruned = pruned._unpruned

    def wrong(made):
        network, calls = unpruned(made), []

        def other(module, images, result):
            # Others than in the first calls, which are what it is compared with.
            calls.append(images)
            by = 1 + 0.1 * (len(calls) > pruned.JUDGED)
            return (by * result[0], result[1]) if isinstance(result, tuple) else by * result

        network.register_forward_hook(other)
        return network

    monkeypatch.setattr(pruned, "_unpruned", wrong)
    (row, *_) = run([{"keep_ratio": 0.5}], ("unpruned", "padded"), modes={"eager": [1]})
    assert (row["batching"], row["status"], row["p50_us"]) == ("unpruned", "failed", "")
    assert "logits differ by" in row["reason"]


def test_a_learned_predictor_comes_from_a_checkpoint(tmp_path):
    path = tmp_path / "folder" / "learned.pth"
    path.parent.mkdir()
    network = networks.create("deit", variant="tiny", image_size=64, seed=3, pruner="dynamicvit", predictor="random")
    torch.save(network.state_dict(), path)
    (row,) = run([{"keep_ratio": 0.5, "checkpoint": str(path)}], ("ragged",), name="deit-tiny-64-dynamicvit")
    assert (row["status"], row["setting"]) == ("ok", "keep_ratio=0.5 checkpoint=learned.pth")
    # Its head, too, is the file's: none is fitted.
    options = {"variant": "tiny", "image_size": 64, "pruner": "dynamicvit", "keep_ratio": 0.5}
    network = networks.create("deit", **options, checkpoint=str(path))
    with torch.inference_mode():
        logits = network(pruned.crops(pruned.JUDGED, 64))
    assert row["largest_logit"] == pytest.approx(float(logits.abs().max()), rel=1e-4)


def test_a_learned_predictor_without_a_checkpoint_is_refused(tmp_path):
    stated = ["settings=[{keep_ratio: 0.5}]", "batching=[padded]", "modes={eager: [1]}"]
    with pytest.raises(ConfigError, match="checkpoint: expected one with"):
        command("pruned", "deit-tiny-64-dynamicvit", tmp_path / "x.csv", *stated)


def test_a_case_reads_its_checkpoints():
    chosen = experiments.parse(
        "pruned",
        {
            "settings": [{"checkpoint": "b.pth"}, {}, {"checkpoint": "a.pth"}, {"checkpoint": "cached"}],
            "batching": ["padded"],
            "modes": {"eager": [1]},
            "max_seconds": 1.0,
        },
    )
    assert experiments.member("pruned").sources(chosen) == ["a.pth", "b.pth"]


def test_a_deit_is_a_network_like_the_others(tmp_path):
    attention = f"attention={json.dumps({name: [1] for name in batching.NAMES})}"
    command("networks", "deit-tiny-64-evit", tmp_path / "n.csv", attention, "compiled={}", "plans=[]")
    frame = pd.read_csv(tmp_path / "n.csv").set_index("attention")
    assert list(frame.index) == list(batching.NAMES)
    assert frame.loc["padded", "status"] == frame.loc["ragged", "status"] == "ok"
    assert frame.loc["varlen", "status"] == "skipped"
