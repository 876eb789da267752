"""Steps of a training: what a gradient that is not finite leaves of the weights, on a GPU where there is one."""

import copy
import os
import signal
import stat
import warnings
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors import SafetensorError

from helpers.gpu import TRITON_DEVICE as DEVICE
from tilewright.core.errors import ArtifactError, TrainingError
from tilewright_study.training import _loop, classification, segmentation, states, video


class Recipe(msgspec.Struct):
    """What a state asks of a recipe."""

    weight_decay: float = 0.05
    norm: float = 1.0
    average: float = 0.9


def made(tmp_path):
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 2).to(DEVICE)
    return network, states.State("test", network, Recipe(), tmp_path / "weights.safetensors")


def steps(network, state, scales):
    """A step for each of `scales`, which the gradients of its loss are multiplied by."""
    for number, scale in enumerate(scales):
        images = torch.linspace(-1, 1, 12, device=DEVICE).view(4, 3) + number
        loss = network(images).square().mean()
        loss.backward()
        for x in network.parameters():
            x.grad.mul_(scale)
        state.take(0.1, loss)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path, wrong):
    network, state = made(tmp_path)
    steps(network, state, [1.0, 1.0])
    before = copy.deepcopy(network.state_dict())
    steps(network, state, [wrong])
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    assert state.step == 3 and len(state.told) == 3
    steps(network, state, [1.0])
    assert not any(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    with pytest.warns(UserWarning, match="1 of 4 steps were left out"):
        state.settle()
    assert all(x.isfinite().all() for x in network.parameters())


def test_one_gradient_of_many_is_enough(tmp_path):
    """Also where the others are as they should be, before they are clipped."""
    network, state = made(tmp_path)
    before = copy.deepcopy(network.state_dict())
    network(torch.ones(1, 3, device=DEVICE)).sum().backward()
    network.bias.grad[0] = float("inf")
    state.take(0.1, 0.0)
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())


def test_finite_gradients_move_weights_as_adamw_does(tmp_path):
    network, state = made(tmp_path)
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 2).to(DEVICE)
    groups = [{"params": [plain.weight], "weight_decay": 0.05}, {"params": [plain.bias], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=0.1, fused=DEVICE == "cuda")
    for number in range(4):
        for each in (network, plain):
            each(torch.linspace(-1, 1, 12, device=DEVICE).view(4, 3) + number).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        state.take(0.1, 0.0)
        assert all(torch.equal(x, y) for x, y in zip(network.parameters(), plain.parameters(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.settle()


def test_many_steps_without_finite_gradients_end_the_training(tmp_path, monkeypatch):
    """Also where every other step is as it should be."""
    monkeypatch.setattr(states, "COUNTED", 10)
    monkeypatch.setattr(states, "MOST_LEFT_OUT", 4)
    network, state = made(tmp_path)
    steps(network, state, [1.0] * 10 + [1.0, float("nan")] * 4)
    with pytest.raises(TrainingError, match="found 5 of the 10 steps to step 20 without"):
        steps(network, state, [1.0, float("nan")])


def test_few_steps_without_finite_gradients_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "COUNTED", 10)
    monkeypatch.setattr(states, "MOST_LEFT_OUT", 4)
    network, state = made(tmp_path)
    steps(network, state, ([1.0] * 6 + [float("inf")] * 4) * 3)
    assert state.step == 30 and state.left_out == 12


def test_attention_of_cudnn_is_left_out_of_a_training_alone():
    @_loop.finite()
    def inside():
        return torch.backends.cuda.cudnn_sdp_enabled()

    before = torch.backends.cuda.cudnn_sdp_enabled()
    assert before and not inside() and torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), _loop.finite():
        raise ZeroDivisionError
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "train", [segmentation.train, classification.train, classification.train_predictor, video.train]
)
def test_every_training_leaves_it_out(train, monkeypatch):
    class Seen(Exception):
        """What was found."""

    def seen(*_):
        raise Seen(torch.backends.cuda.cudnn_sdp_enabled())

    for module, name in ((segmentation, "_check"), (classification, "_check"), (video, "Path")):
        monkeypatch.setattr(module, name, seen)
    with pytest.raises(Seen, match="False"):
        train(SimpleNamespace(attention="dense"), None, None, "weights.safetensors")


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("keys", [16, 64, 256])
def test_attention_in_a_training_has_finite_gradients(keys, head_dim):
    """Of queries all of whose scores are about -120: cuDNN's backward makes NaN of those with 64 keys."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, head_dim, device=DEVICE) * 0.1 for n in (4 * keys, keys, keys))
    q[..., 0], k[..., 0] = 1.0, -120 * head_dim**0.5
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    with _loop.finite():
        torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


# What ends a training early


def broken(number):
    """What ends a training: a picture that cannot be read, or a signal, which waits for the end of the step."""
    if number is None:
        raise ArtifactError("a damaged picture")
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM], ids=["picture", "SIGINT", "SIGTERM"])
def test_what_ends_a_training_early_leaves_its_state(tmp_path, number):
    network, state = made(tmp_path)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ArtifactError if number is None else KeyboardInterrupt), state.kept():
        steps(network, state, [1.0, 1.0])
        broken(number)
        steps(network, state, [1.0, 1.0])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    other_network, other = made(tmp_path)
    other.resume()
    assert other.step == (2 if number is None else 3)
    assert all(map(torch.equal, network.parameters(), other_network.parameters()))


def test_a_training_whose_gradients_are_not_finite_leaves_no_state(tmp_path):
    network, state = made(tmp_path)
    with pytest.raises(TrainingError), state.kept():
        steps(network, state, [float("nan")] * states.COUNTED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rate", "diverges"), [(0.1, False), (1e3, True)])
def test_a_training_whose_loss_has_grown_writes_no_weights(tmp_path, rate, diverges):
    network, state = made(tmp_path)
    images = torch.linspace(-1, 1, 12, device=DEVICE).view(4, 3)
    for _ in range(60):
        loss = network(images).square().mean()
        loss.backward()
        state.take(rate, loss)
    if diverges:
        with pytest.raises(TrainingError, match=r"expected a loss that falls, found .* at step 60; no weights"):
            state.settle()
    else:
        state.settle()


def test_a_state_that_cannot_be_written_does_not_end_a_training(tmp_path, monkeypatch):
    network, state = made(tmp_path)
    steps(network, state, [1.0])
    saved = states.save_file

    def full(tensors, path, header):
        if sum(x.nbytes for x in tensors.values()) > 40:
            raise SafetensorError("I/O error: No space left on device")
        saved(tensors, path, header)

    monkeypatch.setattr(states, "save_file", full)
    with pytest.raises(ArtifactError, match=r"state\.safetensors: cannot be written: .*No space left on device"):
        state.write()
    with pytest.warns(UserWarning, match="No space left on device"):
        assert not state.write_or_warn()
    # The averages fit.
    state.keep(tmp_path / "weights.safetensors", lambda x: x.dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_weights_have_the_permissions_of_other_files(tmp_path):
    _, state = made(tmp_path)
    before = os.umask(0o027)
    try:
        state.keep(tmp_path / "weights.safetensors", lambda x: x.dtype)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weights.safetensors").stat().st_mode) == 0o640
