"""Checkpoint files: as published they load; anything else is named, and nothing has been loaded then."""

import argparse
import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tilewright.core import checkpoints
from tilewright.core.errors import ArtifactError

STATE = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([1.0, 2.0])}
LONG = {f"layer{i}": torch.zeros(1) for i in range(7)}


def same(found, wanted=None):
    wanted = STATE if wanted is None else wanted
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def write(path, content):
    """A file of raw bytes, of tensors, or of anything that pickles."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(STATE, id="plain"),
        pytest.param({"model": STATE, "epoch": 299, "max_accuracy": 80.4}, id="model"),
        pytest.param({"net": STATE, "arch": "msvit", "best_acc": torch.tensor(0.76)}, id="net"),
        pytest.param(
            {"state_dict": STATE, "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]}}, id="state_dict"
        ),
        pytest.param({f"module.{name}": tensor for name, tensor in STATE.items()}, id="module"),
        pytest.param({"net": {f"module.{name}": tensor for name, tensor in STATE.items()}}, id="net-module"),
        pytest.param({"model": STATE, "args": argparse.Namespace(lr=1e-3, data_path="/data")}, id="namespace"),
        pytest.param({"model_state_dict": STATE, "optimizer_state_dict": {"state": {}}}, id="model_state_dict"),
        pytest.param({"model_state": STATE, "epoch": 3}, id="model_state"),
        pytest.param({"model": {"state_dict": STATE}}, id="holder-in-holder"),
        pytest.param(
            {"model_ema": {"module": STATE}, "optimizer": {"state": {0: {"step": STATE["bias"]}}}}, id="alone"
        ),
        pytest.param({f"module._orig_mod.{name}": tensor for name, tensor in STATE.items()}, id="module-compiled"),
        pytest.param({f"_orig_mod.module.{name}": tensor for name, tensor in STATE.items()}, id="compiled-module"),
    ],
)
def test_published_forms_are_read(tmp_path, content):
    assert same(checkpoints.read(write(tmp_path / "net.pth", content)))


def test_a_prefix_that_only_some_names_have_is_part_of_the_name(tmp_path):
    state = {"weight": STATE["weight"], "module.weight": STATE["bias"]}
    assert same(checkpoints.read(write(tmp_path / "net.pth", state)), state)


def test_a_length_that_begins_as_an_index_does_is_a_length(tmp_path):
    """A header of 0x7b20 bytes: a blank and a brace."""
    save_file(STATE, tmp_path / "net.safetensors", {"pad": "x" * 0x7B20})
    found = (tmp_path / "net.safetensors").read_bytes()
    length = int.from_bytes(found[:8], "little")
    header = found[8 : 8 + length].replace(b"x" * (length - 0x7B20), b"", 1)
    (tmp_path / "net.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + found[8 + length :])
    assert len(header) == 0x7B20 and same(checkpoints.read(tmp_path / "net.safetensors"))


def test_files_of_before_torch_1_6_are_read(tmp_path):
    torch.save({"model": STATE}, tmp_path / "net.pth.tar", _use_new_zipfile_serialization=False)
    assert same(checkpoints.read(tmp_path / "net.pth.tar"))


def test_safetensors_are_read(tmp_path):
    state = {"module.w": torch.randn(2, 2).bfloat16(), "module.n": torch.tensor(3)}
    found = checkpoints.read(write(tmp_path / "net.safetensors", state))
    assert same(found, {"w": state["module.w"], "n": state["module.n"]})


def test_what_a_file_is_follows_from_its_first_bytes(tmp_path):
    save_file(STATE, tmp_path / "safe.pth")
    torch.save(STATE, tmp_path / "torch.safetensors")
    (tmp_path / "index").write_text(json.dumps({"weight_map": {"weight": "safe.pth", "bias": "torch.safetensors"}}))
    for name in ("safe.pth", "torch.safetensors", "index"):
        assert same(checkpoints.read(tmp_path / name)), name


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_folder_of_a_published_model_is_read(tmp_path, name, parts):
    (tmp_path / "config.json").write_text("{}")
    if parts == 1:
        write(tmp_path / name, STATE)
    else:
        suffix = name.rpartition(".")[2]
        for key, tensor in STATE.items():
            write(tmp_path / f"part-{key}.{suffix}", {key: tensor})
        index = {"metadata": {}, "weight_map": {key: f"part-{key}.{suffix}" for key in STATE}}
        (tmp_path / f"{name}.index.json").write_text(json.dumps(index))
    assert same(checkpoints.read(tmp_path))


class Code:
    """Would make a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(tmp_path):
    path = write(tmp_path / "net.pth", {"model": STATE, "hook": Code(tmp_path / "made")})
    with pytest.raises(ArtifactError, match=r"net\.pth: expected a checkpoint of tensors only, found other"):
        checkpoints.read(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        pytest.param("net.pth", None, "no such file; expected a checkpoint", id="missing"),
        pytest.param("net.safetensors", None, "no such file; expected a checkpoint", id="safetensors-missing"),
        pytest.param("net.pth", b"text", "expected a checkpoint of", id="text"),
        pytest.param("net.pth", b"", "expected a checkpoint of tensors, found a damaged file", id="nothing"),
        pytest.param("net.safetensors", b"text", "expected a checkpoint of tensors, found a damaged", id="safe-text"),
        pytest.param(
            "net.safetensors", (10**6).to_bytes(8, "little") + b"{}", "of tensors, found a damaged", id="safe-header"
        ),
        pytest.param(
            "net.safetensors", (2).to_bytes(8, "little") + b"[]", "of tensors, found a damaged", id="safe-list"
        ),
        pytest.param("net.pth", [1, 2], "expected a dict of tensors, plain or under model, net, state_dict", id="list"),
        pytest.param("net.pth", {}, "expected a dict of tensors, plain or under", id="empty"),
        pytest.param("net.pth", {"model": {}}, "expected a dict of tensors, plain or under", id="empty-model"),
        pytest.param(
            "net.pth",
            {"w": STATE["bias"], "epoch": 3},
            "expected tensors by name, found other content under epoch$",
            id="mixed",
        ),
        pytest.param("net.pth", {"a": STATE, "b": STATE}, "weights of one network, found several: a, b$", id="two"),
        pytest.param("net.pth", {"w": STATE["weight"].to_sparse()}, "dense tensors .*, found others in w", id="sparse"),
        pytest.param(
            "net.pth", {"model": {3: STATE["bias"]}}, "tensors by name, found other content under 3$", id="numbered"
        ),
        pytest.param(
            "net.pth",
            {"a": torch.zeros(2), "b": torch.tensor([1, torch.nan])},
            "expected finite weights, found NaN or infinity in b$",
            id="nan",
        ),
        pytest.param(
            "net.safetensors", {"w": torch.tensor(-torch.inf).bfloat16()}, "NaN or infinity in w$", id="infinity"
        ),
        pytest.param(
            "net.pth",
            {name: tensor + torch.nan for name, tensor in LONG.items()},
            "in layer0, layer1, layer2, layer3, layer4 and 2 more",
            id="many",
        ),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path, file, content, message):
    path = tmp_path / file
    if content is not None:
        write(path, content)
    with pytest.raises(ArtifactError, match=f"^{re.escape(str(path))}: .*{message}"):
        checkpoints.read(path)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_named(tmp_path, suffix, share):
    path = write(tmp_path / f"net.{suffix}", {"weight": torch.zeros(1000)})
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ArtifactError, match=r"net\.\w+: expected a checkpoint of tensors, found a damaged file"):
        checkpoints.read(path)


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(ArtifactError, match="expected a checkpoint of tensors"):
        checkpoints.read(tmp_path)


def test_a_model_in_several_files_is_read_by_its_index(tmp_path):
    for name, tensor in STATE.items():
        write(tmp_path / f"net-{name}.safetensors", {name: tensor})
    index = tmp_path / "net.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"net-{name}.safetensors" for name in STATE}}))
    assert same(checkpoints.read(index))
    (tmp_path / "net-bias.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"expected its parts in the same folder, missing net-bias\.safetensors"):
        checkpoints.read(index)
    index.write_text("{}")
    with pytest.raises(ArtifactError, match="found a damaged file"):
        checkpoints.read(index)


def as_it_is(state, network):
    return state


def test_a_checkpoint_is_loaded_as_it_is_adapted(tmp_path):
    network, path = nn.Linear(3, 2), write(tmp_path / "net.pth", {"net": {"w": STATE["weight"], "bias": STATE["bias"]}})
    checkpoints.load(network, path, lambda state, _: {"weight": state.pop("w"), **state})
    assert same(network.state_dict())


@pytest.mark.parametrize("prefix", ["model.", "net.model.", "model._orig_mod.", "model.module.", "module.model.", "0."])
def test_what_all_names_begin_with_is_found_by_those_of_the_network(tmp_path, prefix):
    network = nn.Sequential(nn.Linear(3, 2))
    path = write(tmp_path / "net.pth", {f"{prefix}0.{name}": tensor for name, tensor in STATE.items()})
    checkpoints.load(network, path, as_it_is)
    assert same(network[0].state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param({"weight": STATE["weight"]}, "1 missing: bias$", id="missing"),
        pytest.param({**STATE, "extra": torch.zeros(1)}, "1 unexpected: extra$", id="unexpected"),
        pytest.param(
            {**STATE, "weight": torch.ones(3, 2)}, r"1 mis-shaped: weight \[3, 2\] for \[2, 3\]$", id="mis-shaped"
        ),
        pytest.param(
            {"bias": torch.ones(()), **LONG},
            r"1 missing: weight; 7 unexpected: layer0, layer1, layer2, layer3, layer4 and 2 more; "
            r"1 mis-shaped: bias \[\] for \[2\]$",
            id="all",
        ),
        pytest.param({**STATE, "bias": STATE["bias"].char()}, "1 mis-typed: bias torch.int8 for", id="mis-typed"),
        pytest.param({**STATE, "bias": STATE["bias"] + torch.nan}, "expected finite weights, found NaN", id="nan"),
    ],
)
def test_a_checkpoint_of_another_network_loads_nothing(tmp_path, state, message):
    network = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ArtifactError, match=message):
        checkpoints.load(network, write(tmp_path / "net.pth", {"model": state}), as_it_is)
    assert same(network.state_dict(), before)


@pytest.mark.parametrize(
    "adapt",
    [
        pytest.param(lambda state, _: {"weight": state["absent"]}, id="key"),
        pytest.param(lambda state, _: {"weight": state["weight"].reshape(5)}, id="shape"),
        pytest.param(lambda state, _: {"weight": state["weight"].movedim(3, 0)}, id="axis"),
        pytest.param(lambda state, _: {"weight": state["bias"].unflatten(0, (0, 0))}, id="grid"),
    ],
)
def test_a_checkpoint_that_cannot_be_adapted_is_named(tmp_path, adapt):
    network, path = nn.Linear(3, 2), write(tmp_path / "net.pth", STATE)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ArtifactError, match=r"net\.pth: not a checkpoint of this network: "):
        checkpoints.load(network, path, adapt)
    assert same(network.state_dict(), before)
