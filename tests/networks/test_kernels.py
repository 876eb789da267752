"""Kernels of operators on maps: chosen by time among those that are right, and only then."""

import copy
import json
import logging
from types import SimpleNamespace

import pytest
import torch

from tilewright import devices, networks
from tilewright.core import timing
from tilewright.core.errors import ConfigError, PatternError
from tilewright.networks import _kernels, backends, map_operators


@pytest.fixture
def network():
    return networks.create("segformer", variant="b0", image_size=32, num_classes=5)


BLOCK = ["attention", "linear_add", "norm_linear", "dwconv_gelu", "linear_add"]
OPERATORS = 4 * ["patches", *BLOCK, "norm"] + ["decode"]
# Of a stage of B0, which has two blocks.
STAGE = ["patches", *BLOCK, *BLOCK, "norm"]
CALLS = 4 * len(STAGE) + 1


@pytest.fixture
def images():
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A device's kernels: torch's operators, counted. wrong: forms whose result is off; slow: those that take long;
    timed: how many candidates were. What is chosen is kept in `tmp_path`."""
    told = SimpleNamespace(runs=[], wrong=set(), refused=set(), slow={"torch"}, timed=0)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))

    def kernel(operator):
        def run(*arguments):
            *arguments, form = arguments
            told.runs.append((operator, form[0]))
            if form[0] in told.refused:
                raise PatternError("does not fit")
            return getattr(map_operators, operator)(*arguments) * (1.01 if form[0] in told.wrong else 1)

        return run

    forms = {name: ("a", "b") for name in map_operators.KERNELS}
    module = SimpleNamespace(FORMS=forms, REFUSALS=(PatternError,), **{name: kernel(name) for name in forms})
    monkeypatch.setattr(backends, "maps", lambda kind: module)

    def time_call(call, **_):
        told.timed += 1
        before = len(told.runs)
        call()
        form = told.runs[-1][1] if len(told.runs) > before else "torch"
        return SimpleNamespace(p50_us=9.0 if form in told.slow else 2.0 if form == "b" else 3.0)

    monkeypatch.setattr(timing, "time_call", time_call)
    return told


@torch.inference_mode()
def test_the_fastest_kernel_runs_from_then_on(network, images, kernels):
    expected = network(images)
    rows = networks.choose_kernels(network, images)
    assert [row["operator"] for row in rows if row["form"] == "torch"] == OPERATORS
    assert [row["form"] for row in rows if row["chosen"]] == ["b"] * len(OPERATORS)
    assert {row["form"]: row["us"] for row in rows} == {"torch": 9.0, "a": 3.0, "b": 2.0}
    kernels.runs.clear()
    assert torch.equal(network(images), expected)
    assert kernels.runs == [(name, "b") for name in 4 * STAGE + ["decode"]]


@torch.inference_mode()
def test_paths_of_other_sizes_have_kernels_of_their_own(kernels):
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=5)
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    half, early = "2.2.2.2 scale=0.5", network.path("2.2.2.2 levels=123")
    taken = {half: CALLS, early: CALLS - len(STAGE), "1.1.1.0 scale=0.5": 3 * len(BLOCK) + 4 * 2 + 1}
    expected = [network(images, path) for path in taken]
    networks.choose_kernels(network, images)
    kernels.runs.clear()
    network(images, half)
    assert kernels.runs == []
    assert networks.choose_kernels(network, images, [None, half, early])
    # Sets of blocks have no sizes of their own, and nothing is chosen twice.
    assert networks.choose_kernels(network, images, list(taken)) == []
    for (path, calls), maps in zip(taken.items(), expected, strict=True):
        kernels.runs.clear()
        assert torch.equal(network(images, path), maps)
        assert [form for _, form in kernels.runs] == ["b"] * calls


@torch.inference_mode()
def test_a_wrong_kernel_is_not_timed_and_not_chosen(network, images, kernels):
    kernels.wrong = {"b"}
    rows = networks.choose_kernels(network, images)
    assert [row["form"] for row in rows if row["chosen"]] == ["a"] * len(OPERATORS)
    for row in rows:
        assert (row["status"] == "failed") == (row["form"] == "b") == ("us" not in row)
        assert row["status"] == "ok" or "of the largest value from float32" in row["reason"]


@torch.inference_mode()
def test_torchs_operator_may_be_the_fastest_and_a_form_may_not_fit(network, images, kernels):
    kernels.slow, kernels.refused = {"a"}, {"b"}
    rows = networks.choose_kernels(network, images)
    assert {row["form"]: row["status"] for row in rows} == {"torch": "ok", "a": "ok", "b": "skipped"}
    # The first of equals.
    assert [row["form"] for row in rows if row["chosen"]] == ["torch"] * len(OPERATORS)
    kernels.runs.clear()
    network(images)
    assert kernels.runs == []


@torch.inference_mode()
def test_what_was_fastest_is_kept_and_checked(network, images, kernels, tmp_path):
    networks.choose_kernels(network, images)
    timed, other = kernels.timed, networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    rows = networks.choose_kernels(other, images)
    assert kernels.timed == timed and other.operators.chosen == network.operators.chosen
    assert [row["operator"] for row in rows] == OPERATORS
    for row in rows:
        assert row["form"] == "b" and row["chosen"] and row["status"] == "ok" and "us" not in row and "error" in row
    (file,) = (tmp_path / "kernels").glob("*.json")
    assert len(json.loads(file.read_text())["chosen"]) == len(OPERATORS)
    # What is kept and not right any more is chosen anew, and so is all where that is asked for.
    kernels.wrong, other = {"b"}, networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    assert networks.choose_kernels(other, images) and set(other.operators.chosen.values()) == {"a"}
    assert kernels.timed == timed + 2 * len(OPERATORS)
    kernels.wrong, other = set(), networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    networks.choose_kernels(other, images)
    assert set(other.operators.chosen.values()) == {"a"}
    other = networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    networks.choose_kernels(other, images, anew=True)
    assert set(other.operators.chosen.values()) == {"b"}
    assert set(json.loads(file.read_text())["chosen"].values()) == {"b"}


@torch.inference_mode()
def test_another_device_or_other_code_chooses_for_itself(network, images, kernels, monkeypatch, tmp_path):
    networks.choose_kernels(network, images)
    for name, found in ((devices, "device_id"), (_kernels.provenance, "package_digest")):
        with monkeypatch.context() as patch:
            patch.setattr(name, found, lambda *_: "another")
            timed, other = kernels.timed, networks.create("segformer", variant="b0", image_size=32, num_classes=5)
            networks.choose_kernels(other, images)
            assert kernels.timed == timed + 3 * len(OPERATORS)
    assert len(list((tmp_path / "kernels").glob("*.json"))) == 3


@torch.inference_mode()
def test_choices_of_other_sizes_stand_beside_each_other(network, images, kernels, tmp_path):
    networks.choose_kernels(network, images)
    networks.choose_kernels(network, torch.cat((images, images)))
    (file,) = (tmp_path / "kernels").glob("*.json")
    assert len(json.loads(file.read_text())["chosen"]) == 2 * len(OPERATORS)
    timed, other = kernels.timed, networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    networks.choose_kernels(other, images)
    networks.choose_kernels(other, torch.cat((images, images)))
    assert kernels.timed == timed


@torch.inference_mode()
def test_what_was_chosen_before_an_error_is_kept(network, images, kernels, tmp_path):
    with pytest.raises(ConfigError):
        networks.choose_kernels(network, images, [None, "3.3.3.3"])
    (file,) = (tmp_path / "kernels").glob("*.json")
    assert len(json.loads(file.read_text())["chosen"]) == len(OPERATORS)


@pytest.mark.parametrize("text", ["{", '{"kind": "kernels", "version": 9}', '{"kind": "kernels", "version": 1}'])
def test_a_damaged_file_of_choices_is_named_and_made_anew(network, images, kernels, tmp_path, caplog, text):
    networks.choose_kernels(network, images)
    (file,) = (tmp_path / "kernels").glob("*.json")
    whole = file.read_text()
    file.write_text(text)
    other = networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    with caplog.at_level(logging.WARNING):
        networks.choose_kernels(other, images)
    assert f"kernels are chosen again: {file}: expected" in caplog.text
    assert other.operators.chosen == network.operators.chosen and file.read_text() == whole


def test_without_a_place_choices_serve_the_process(network, images, kernels, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        networks.choose_kernels(network, images)
    assert "serves this process alone" in caplog.text and set(network.operators.chosen.values()) == {"b"}


def test_weights_of_convolutions_lie_as_maps_do(network, images, kernels):
    before = {name: x.detach().clone() for name, x in network.state_dict().items()}
    old = network.backbone.block1[0].attn.sr.weight.data
    networks.choose_kernels(network, images)
    weight = network.backbone.block1[0].attn.sr.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    # Who captured the network before reads what is still there; a second choice copies nothing.
    assert any(x.data_ptr() == old.data_ptr() for x in network.operators.held)
    places = weight.data_ptr(), len(network.operators.held)
    networks.choose_kernels(network, images, ["2.2.2.2 levels=123"])
    assert places == (weight.data_ptr(), len(network.operators.held))


def test_other_sizes_and_gradients_run_torchs_operators(network, images, kernels):
    networks.choose_kernels(network, images)
    kernels.runs.clear()
    network(images).sum().backward()
    with torch.no_grad():
        network(torch.cat((images, images)))
    assert kernels.runs == []
    with torch.no_grad():
        copy.deepcopy(network)(images)
    assert len(kernels.runs) == CALLS


@torch.inference_mode()
def test_compiled_parts_run_the_chosen_kernels(network, images, kernels):
    """A kernel is one operator for the compiler, which cuts no graph there."""
    networks.choose_kernels(network, images)
    expected = network(images, None, network.fold())
    torch.compiler.reset()
    compiled = network.compiled(backend="eager", fullgraph=True, dynamic=False)
    kernels.runs.clear()
    torch.testing.assert_close(compiled(images, None, compiled.fold()), expected)
    assert len(kernels.runs) == CALLS and {form for _, form in kernels.runs} == {"b"}


@torch.inference_mode()
def test_a_target_without_kernels_keeps_torchs_operators(network, images):
    assert backends.maps("cpu") is None
    assert {row["form"] for row in networks.choose_kernels(network, images)} == {"torch"}


def test_a_network_without_such_operators_is_named(images):
    network = networks.create("swin", variant="tiny", image_size=32)
    with pytest.raises(ConfigError, match=r"expected a network whose operators have kernels, found .*swin"):
        networks.choose_kernels(network, images)


def test_sizes_tell_tensors_apart():
    x = torch.zeros(2, 4, 8)
    assert map_operators.sizes(map_operators.dwconv_gelu, (x, (2, 2), x, None)) == (
        "dwconv_gelu",
        x.dtype,
        ((2, 4, 8), (2, 4, 8)),
    )
    assert _kernels._text("decode", ([x], (2, 2), None)) == "decode((float32[2x4x8]), (2, 2), None)"
    assert _kernels._first(([x], x)) is x
